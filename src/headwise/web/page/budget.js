// Results against golden ones: the rule of headwise.testing.compare, with budgets that were computed there.

/** Elements of an output as float64 can hold them. */
export function decode(bytes, dtype) {
  if (dtype === "float32") return new Float32Array(bytes);
  const halves = new Uint16Array(bytes);
  if (dtype === "bfloat16") {
    const words = Uint32Array.from(halves, (half) => half << 16);
    return new Float32Array(words.buffer);
  }
  if (dtype === "float16") return Float32Array.from(halves, float16);
  throw new Error(`outputs of ${dtype} are not known`);
}

function float16(half) {
  const sign = half & 0x8000 ? -1 : 1;
  const exponent = (half >> 10) & 31;
  const fraction = half & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}

/**
 * How far ours lie from golden: root mean square and largest difference over finite elements, each against what is
 * allowed. Infinities and NaN have to be exactly where the golden ones are; that, no budget forgives.
 */
export function compare(ours, golden, allowed) {
  if (ours.length !== golden.length) return failure(`${ours.length} elements, expected ${golden.length}`);
  let squares = 0;
  let largest = 0;
  let finite = 0;
  let misplaced = 0;
  for (let i = 0; i < golden.length; i++) {
    const truth = golden[i];
    if (!Number.isFinite(truth)) {
      if (!Object.is(ours[i], truth)) misplaced++;
      continue;
    }
    const error = Math.abs(ours[i] - truth);
    if (!Number.isFinite(error)) {
      misplaced++;
      continue;
    }
    finite++;
    squares += error * error;
    largest = Math.max(largest, error);
  }
  if (misplaced) return failure(`NaN or infinity out of place in ${misplaced} of ${golden.length} elements`);
  const rms = finite ? Math.sqrt(squares / finite) : 0;
  const usage = Math.max(share(rms, allowed.rms), share(largest, allowed.largest));
  return { problem: "", rms, largest, usage, passed: usage <= 1 };
}

const share = (error, allowed) => (allowed > 0 ? error / allowed : error === 0 ? 0 : Infinity);
const failure = (problem) => ({ problem, rms: null, largest: null, usage: Infinity, passed: false });
