// A recorded program: buffers, what is in them at first, and dispatches, one after the other.

const { STORAGE, COPY_SRC, COPY_DST, UNIFORM, MAP_READ, QUERY_RESOLVE } = globalThis.GPUBufferUsage ?? {};
const NOTHING_YET = 0xff; // in every byte: NaN as a float of any width

export class Program {
  /** Compile its kernels and fill its buffers. data: bytes that the program refers to. */
  static async load(gpu, described, shaders, data) {
    const keys = [...new Set(described.dispatches.map(({ shader }) => shader))];
    const compiled = await Promise.all(keys.map((key) => gpu.pipeline(key, shaders[key])));
    const pipelines = new Map(keys.map((key, i) => [key, compiled[i]]));
    const program = new Program(gpu, described, pipelines);
    await program.#guarded(() => program.#allocate(data));
    return program;
  }

  constructor(gpu, described, pipelines) {
    Object.assign(this, { gpu, described, pipelines, owned: [] });
  }

  #allocate(data) {
    const { device } = this.gpu;
    this.buffers = this.described.buffers.map((buffer) => {
      const usage = STORAGE | COPY_SRC | COPY_DST;
      if (buffer.random) return drawn(device, this.#own(device.createBuffer({ size: buffer.size, usage })), buffer);
      const made = this.#own(device.createBuffer({ size: buffer.size, usage, mappedAtCreation: true }));
      const bytes = new Uint8Array(made.getMappedRange());
      bytes.fill(NOTHING_YET);
      if (buffer.data) bytes.set(new Uint8Array(data, ...buffer.data));
      made.unmap();
      return made;
    });
    this.steps = this.described.dispatches.map((dispatch) => {
      const parameters = Uint8Array.from(atob(dispatch.parameters), (c) => c.charCodeAt(0));
      const uniform = this.#own(device.createBuffer({ size: parameters.length, usage: UNIFORM | COPY_DST }));
      device.queue.writeBuffer(uniform, 0, parameters);
      const { pipeline, layout } = this.pipelines.get(dispatch.shader);
      const bound = dispatch.bound.map((place) => {
        if (!Array.isArray(place)) return { buffer: this.buffers[place] };
        const [which, offset, size] = place;
        return { buffer: this.buffers[which], offset, size };
      });
      const entries = [{ buffer: uniform }, ...bound].map((resource, binding) => ({ binding, resource }));
      return { pipeline, group: device.createBindGroup({ layout, entries }), groups: dispatch.groups, uniform };
    });
    // What every run begins with again, and parameters that count runs: only steps of a training have such.
    this.restored = (this.described.restored ?? []).map((which) => ({
      buffer: this.buffers[which],
      bytes: words(data, ...this.described.buffers[which].data),
    }));
    this.draws = (this.described.draws ?? []).map(({ dispatch, byte, by }) => {
      const parameters = Uint8Array.from(atob(this.described.dispatches[dispatch].parameters), (c) => c.charCodeAt(0));
      const next = new DataView(parameters.buffer).getBigUint64(byte, true);
      return { uniform: this.steps[dispatch].uniform, byte, by: BigInt(by), next };
    });
  }

  #own(buffer) {
    this.owned.push(buffer);
    return buffer;
  }

  /** Write another number into the parameters of a dispatch. */
  setParameter(dispatch, byte, value) {
    this.gpu.device.queue.writeBuffer(this.steps[dispatch].uniform, byte, new Float32Array([value]));
  }

  /** Copy bytes to where a tensor lies: an input. */
  write({ buffer, first, name, ...rest }, bytes) {
    const wanted = bytesOf(rest);
    if (bytes.byteLength !== wanted) {
      throw new Error(`${name} was given ${bytes.byteLength} bytes; it needs ${wanted}: ${rest.dtype} of ${rest.shape}`);
    }
    this.gpu.device.queue.writeBuffer(this.buffers[buffer], first, bytes);
  }

  #encode(pass, from = 0) {
    for (const { pipeline, group, groups } of this.steps.slice(from)) {
      pass.setPipeline(pipeline);
      pass.setBindGroup(0, group);
      pass.dispatchWorkgroups(...groups);
    }
  }

  /** Run it once; the bytes of every output, as many as there are elements. */
  runAndRead(outputs = this.described.outputs) {
    return this.read(outputs, true);
  }

  /** The bytes of tensors as they are now, or after one more run. */
  async read(outputs, run = false) {
    const { device } = this.gpu;
    const staging = await this.#guarded(() => {
      const encoder = device.createCommandEncoder();
      if (run) {
        for (const { buffer, bytes } of this.restored) device.queue.writeBuffer(buffer, 0, bytes);
        for (const draw of this.draws) {
          device.queue.writeBuffer(draw.uniform, draw.byte, new BigUint64Array([draw.next]));
          draw.next += draw.by;
        }
        const pass = encoder.beginComputePass();
        this.#encode(pass);
        pass.end();
      }
      const made = outputs.map((output) => {
        const first = output.first & ~3;
        const size = Math.ceil((output.first + bytesOf(output)) / 4) * 4 - first;
        const buffer = device.createBuffer({ size, usage: COPY_DST | MAP_READ });
        encoder.copyBufferToBuffer(this.buffers[output.buffer], first, buffer, 0, size);
        return buffer;
      });
      device.queue.submit([encoder.finish()]);
      return made;
    });
    try {
      return await Promise.all(
        staging.map(async (buffer, i) => {
          await buffer.mapAsync(GPUMapMode.READ);
          const skipped = outputs[i].first & 3;
          return buffer.getMappedRange().slice(skipped, skipped + bytesOf(outputs[i]));
        }),
      );
    } finally {
      for (const buffer of staging) buffer.destroy();
    }
  }

  /** Seconds that `times` runs take one after the other: by the GPU's own clock where it has one, else until they are done. */
  async time(times) {
    const { device, timestamps } = this.gpu;
    const queries = timestamps ? device.createQuerySet({ type: "timestamp", count: 2 }) : null;
    const resolved = timestamps ? device.createBuffer({ size: 16, usage: QUERY_RESOLVE | COPY_SRC }) : null;
    const read = timestamps ? device.createBuffer({ size: 16, usage: COPY_DST | MAP_READ }) : null;
    await device.queue.onSubmittedWorkDone();
    const before = performance.now();
    await this.#guarded(() => {
      const encoder = device.createCommandEncoder();
      const writes = timestamps
        ? { timestampWrites: { querySet: queries, beginningOfPassWriteIndex: 0, endOfPassWriteIndex: 1 } }
        : {};
      const pass = encoder.beginComputePass(writes);
      for (let i = 0; i < times; i++) this.#encode(pass, this.described.prepared);
      pass.end();
      if (timestamps) {
        encoder.resolveQuerySet(queries, 0, 2, resolved, 0);
        encoder.copyBufferToBuffer(resolved, 0, read, 0, 16);
      }
      device.queue.submit([encoder.finish()]);
    });
    await device.queue.onSubmittedWorkDone();
    const wall = (performance.now() - before) / 1000;
    if (!timestamps) return { seconds: wall, clock: "wall" };
    await read.mapAsync(GPUMapMode.READ);
    const [begin, end] = new BigUint64Array(read.getMappedRange().slice(0));
    for (const thing of [queries, resolved, read]) thing.destroy();
    const seconds = Number(end - begin) * 1e-9;
    // A clock that stands still, or runs faster than the one on the wall, is none.
    return seconds > 0 && seconds <= wall ? { seconds, clock: "GPU" } : { seconds: wall, clock: "wall" };
  }

  destroy() {
    for (const buffer of this.owned) buffer.destroy();
  }

  /** Do something at once, and fail if the GPU did not like it. */
  async #guarded(action) {
    const { device, lost } = this.gpu;
    if (lost) throw new Error("the GPU was lost");
    device.pushErrorScope("out-of-memory");
    device.pushErrorScope("validation");
    let result;
    try {
      result = action();
    } finally {
      const errors = await Promise.all([device.popErrorScope(), device.popErrorScope()]);
      const error = errors.find(Boolean);
      if (error) throw new Error(error.message || "out of memory");
    }
    return result;
  }
}

/** Bytes of the data, up to the end of a word: blocks are padded, and only whole words can be written. */
const words = (data, first, size) => new Uint8Array(data, first, Math.ceil(size / 4) * 4);

const WIDTHS = { float32: 4, float16: 2, bfloat16: 2, int64: 8, int32: 4, int16: 2, int8: 1, uint8: 1, bool: 1 };
const bytesOf = ({ shape, dtype }) => shape.reduce((product, size) => product * size, WIDTHS[dtype]);

const DRAWN = 1 << 20;
let normal;

/** Fill a buffer with numbers of about normal distribution; a million of them, again and again. */
function drawn(device, buffer, { size, random }) {
  if (random !== "float32") throw new Error(`no random numbers of ${random}`);
  normal ??= Float32Array.from({ length: DRAWN }, generator(1));
  for (let first = 0; first < size; first += 4 * DRAWN) {
    device.queue.writeBuffer(buffer, first, normal, 0, Math.min(DRAWN, (size - first) / 4));
  }
  return buffer;
}

/** Twelve uniform numbers less six are nearly normal: mean 0, variance 1. The uniform ones are mulberry32's. */
function generator(seed) {
  let state = seed;
  const uniform = () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
  return () => {
    let sum = -6;
    for (let i = 0; i < 12; i++) sum += uniform();
    return sum;
  };
}
