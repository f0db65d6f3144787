// A step of a training or of a generation that `headwise.webgpu.save_step` wrote: run it again and again.
//
//   const step = await Step.load(gpu, await (await fetch("train.step")).arrayBuffer());
//   const { loss } = await step.run({ ids: new BigInt64Array(…), targets: new BigInt64Array(…) });
//   const { "embedding.weight": weight } = await step.state(["embedding.weight"]);

import { Program } from "./program.js";

const FORMAT = 1;
const ARRAYS = {
  float32: Float32Array,
  int64: BigInt64Array,
  int32: Int32Array,
  int16: Int16Array,
  int8: Int8Array,
  uint8: Uint8Array,
  bool: Uint8Array,
  // 16-bit floats come as their bits.
  float16: Uint16Array,
  bfloat16: Uint16Array,
};

export class Step {
  /** Compile its kernels and fill its memory. */
  static async load(gpu, file) {
    const length = Number(new DataView(file).getBigUint64(0, true));
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, length)));
    if (header.format !== FORMAT) throw new Error(`the step has format ${header.format}; this page reads ${FORMAT}`);
    return new Step(await Program.load(gpu, header.program, header.shaders, file.slice(8 + length)));
  }

  constructor(program) {
    this.program = program;
  }

  /** Run it with new inputs, all of them; the elements of its outputs, by name. */
  async run(inputs = {}) {
    const { described } = this.program;
    const known = described.inputs.map(({ name }) => name);
    const wrong = [...known.filter((name) => !(name in inputs)), ...Object.keys(inputs).filter((n) => !known.includes(n))];
    if (wrong.length) throw new Error(`the inputs of this step are ${known.join(", ")}; ${wrong.join(", ")} is not right`);
    for (const place of described.inputs) this.program.write(place, inputs[place.name]);
    return named(described.outputs, await this.program.runAndRead());
  }

  /** What it changes, as it is now; of all tensors, or of some. */
  async state(names) {
    const places = this.program.described.state.filter(({ name }) => !names || names.includes(name));
    return named(places, await this.program.read(places));
  }

  destroy() {
    this.program.destroy();
  }
}

const named = (places, bytes) =>
  Object.fromEntries(places.map(({ name, dtype }, i) => [name, new ARRAYS[dtype](bytes[i])]));
