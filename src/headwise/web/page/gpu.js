// The GPU of this machine: finding it, saying why there is none, and choosing the kernels that it can run.

import { Program } from "./program.js";

/** No kernel can run here. */
export class Trouble extends Error {
  constructor(kind, title, ...advice) {
    super(title);
    this.kind = kind;
    this.advice = advice;
  }
}

/** The adapter and a device without the features left out, or a Trouble that says what is missing and what to do. */
export async function open(without = []) {
  if (!isSecureContext) {
    throw new Trouble(
      "insecure",
      "This page was loaded over a connection that is not secure.",
      "Browsers offer WebGPU only to pages from https:// addresses and from this machine itself.",
      `Open it as https://${location.host}${location.pathname}, or on the machine that serves it as http://localhost:${location.port}.`,
    );
  }
  if (!navigator.gpu) {
    throw new Trouble(
      "missing",
      "This browser has no WebGPU.",
      "Recent versions of Chrome, Edge, Safari and Firefox have it, though not on every system: try a newer one, or another browser.",
      "It may also be switched off: look for WebGPU in chrome://flags or about:config.",
    );
  }
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) {
    throw new Trouble(
      "no adapter",
      "The browser has WebGPU, and found no GPU for it.",
      "Hardware acceleration may be switched off in its settings, or the driver may be on the browser's list of those with known faults: chrome://gpu says which.",
      "On Linux, Chrome needs Vulkan and may have to be asked: chrome://flags/#enable-unsafe-webgpu.",
    );
  }
  const features = ["subgroups", "timestamp-query"].filter(
    (name) => adapter.features.has(name) && !without.includes(name),
  );
  let device;
  try {
    device = await adapter.requestDevice({ requiredFeatures: features });
  } catch (error) {
    throw new Trouble(
      "no device",
      "The GPU is there, and the browser could not open it.",
      String(error.message ?? error),
      "Closing other pages that use it, or restarting the browser, often helps.",
    );
  }
  return new Gpu(adapter, device);
}

export class Gpu {
  constructor(adapter, device) {
    this.adapter = adapter;
    this.device = device;
    this.timestamps = device.features.has("timestamp-query");
    this.lost = null; // why, once it is
    this.pipelines = new Map();
    device.lost.then((info) => {
      this.lost = info.message || info.reason || "no reason was given";
      this.onLost?.(this.lost);
    });
  }

  /** What the browser tells about the adapter. */
  describe() {
    const { info, features, limits } = this.adapter;
    return {
      vendor: info.vendor,
      architecture: info.architecture,
      device: info.device,
      description: info.description,
      software: info.isFallbackAdapter ?? false,
      subgroups: info.subgroupMinSize ? [info.subgroupMinSize, info.subgroupMaxSize] : null,
      features: [...features].sort(),
      limits: Object.fromEntries(
        [
          "maxBufferSize",
          "maxStorageBufferBindingSize",
          "maxComputeWorkgroupStorageSize",
          "maxComputeInvocationsPerWorkgroup",
        ].map((name) => [name, limits[name]]),
      ),
    };
  }

  /** In a few words. */
  get name() {
    const { info } = this.adapter;
    return (
      info.description ||
      info.device ||
      [info.vendor, info.architecture].filter(Boolean).join(" ") ||
      "a GPU that tells nothing of itself"
    );
  }

  /** The pipeline of a shader, compiled once. Rejects with the compiler's words. */
  pipeline(key, { text, writes }) {
    if (!this.pipelines.has(key)) this.pipelines.set(key, this.#compile(key, text, writes));
    return this.pipelines.get(key);
  }

  async #compile(key, text, writes) {
    const { device } = this;
    const entry = (binding, type) => ({ binding, visibility: GPUShaderStage.COMPUTE, buffer: { type } });
    device.pushErrorScope("validation");
    const module = device.createShaderModule({ label: key, code: text });
    const refused = await device.popErrorScope();
    if (refused) {
      const { messages } = await module.getCompilationInfo();
      const first = messages.find(({ type }) => type === "error");
      throw new Error(
        `${key} does not compile: ${first ? `line ${first.lineNum}: ${first.message}` : refused.message}`,
      );
    }
    const layout = device.createBindGroupLayout({
      entries: [
        entry(0, "uniform"),
        ...writes.map((written, i) => entry(i + 1, written ? "storage" : "read-only-storage")),
      ],
    });
    try {
      const pipeline = await device.createComputePipelineAsync({
        label: key,
        layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }),
        compute: { module, entryPoint: "main" },
      });
      return { pipeline, layout };
    } catch (error) {
      throw new Error(`${key} makes no pipeline: ${error.message}`);
    }
  }
}

/** The tier whose programs this GPU runs, and why that one. */
export async function chooseTier(gpu, site, shaders, wanted) {
  const { narrowest, why } = await narrowestSubgroup(gpu, site, shaders);
  const best = site.tiers.find((tier) => tier.subgroup <= narrowest);
  if (!wanted) return { tier: best, why };
  const asked = site.tiers.find((tier) => tier.name === wanted);
  if (!asked) return { tier: best, why: `${why}; “${wanted}” is no tier` };
  if (asked.subgroup > narrowest) return { tier: best, why: `${why}; “${wanted}” was asked for and needs more` };
  return { tier: asked, why: "asked for in the address" };
}

/** Of any kernel, as far as can be promised; 0 where subgroups are not to be used. */
async function narrowestSubgroup(gpu, site, shaders) {
  if (!gpu.device.features.has("subgroups")) return { narrowest: 0, why: "the browser offers no subgroups here" };
  const promised = gpu.adapter.info.subgroupMinSize;
  if (!promised) return { narrowest: 0, why: "the browser does not say how narrow its subgroups are" };
  const least = Math.min(...site.tiers.filter(({ subgroup }) => subgroup).map(({ subgroup }) => subgroup));
  if (promised < least)
    return { narrowest: 0, why: `subgroups may be as narrow as ${promised}, and the kernels need ${least}` };
  let seen, outOfOrder;
  try {
    const program = await Program.load(gpu, site.probe, shaders, null);
    [seen, outOfOrder] = new Uint32Array((await program.runAndRead())[0]);
    program.destroy();
  } catch (error) {
    return { narrowest: 0, why: `a first kernel with subgroups failed: ${error.message}` };
  }
  if (outOfOrder) return { narrowest: 0, why: "the lanes of a subgroup are in an order of their own here" };
  return {
    narrowest: Math.min(promised, seen),
    why: `a kernel here sees ${seen} lanes, and at least ${promised} are promised`,
  };
}
