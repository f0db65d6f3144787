// The attention weights of the run: which head looks from where to where.

/** Read what report.py packed. What is no weight becomes NaN. The mean of a layer's heads comes as one more head. */
export function unpack(sample) {
  const size = sample.tokens.length;
  const layers = sample.layers.map((layer) => {
    const bytes = Uint8Array.from(atob(layer.weights), (character) => character.charCodeAt(0));
    const codes = new DataView(bytes.buffer);
    const all = Float32Array.from({ length: bytes.length / 2 }, (_, i) => {
      const code = codes.getUint16(2 * i, true);
      return code > sample.whole ? NaN : code / sample.whole;
    });
    const heads = Array.from({ length: layer.heads }, (_, h) => all.subarray(h * size * size, (h + 1) * size * size));
    const mean = Float32Array.from(
      { length: size * size },
      (_, i) => heads.reduce((sum, h) => sum + h[i], 0) / heads.length,
    );
    return { name: layer.name, window: layer.window, heads: [...heads, mean] };
  });
  return { tokens: sample.tokens, size, layers };
}

/** Whether a query may see a key: not what comes after it, nor what lies before its window. */
export const sees = (layer, query, key) => key <= query && (layer.window === null || key > query - layer.window);

export const isMean = (layer, head) => head === layer.heads.length - 1;

export const headName = (layer, head) => (isMean(layer, head) ? "mean of heads" : `head ${head + 1}`);

/** The keys with the largest weights, largest first. */
export function strongest(row, count) {
  return Array.from(row, (weight, key) => ({ weight, key }))
    .filter(({ weight }) => weight > 0)
    .sort((a, b) => b.weight - a.weight || a.key - b.key)
    .slice(0, count);
}

/** What a head does on average: weight on the byte itself, on the one before, and over how many bytes it spreads. */
export function character(weights, size) {
  let itself = 0;
  let before = 0;
  let spread = 0;
  for (let query = 0; query < size; query++) {
    let entropy = 0;
    for (let key = 0; key < size; key++) {
      const weight = weights[query * size + key];
      if (weight > 0) entropy -= weight * Math.log(weight);
    }
    spread += Math.exp(entropy) / size;
    itself += weights[query * size + query] / size;
    if (query > 0) before += weights[query * size + query - 1] / (size - 1);
  }
  return { itself, before, spread };
}

const FAR = 4; // bytes away: beyond the nearest neighbours

/** Where there is most to see at first sight: the head that puts most weight on single bytes far from where it looks
 * from, and in the second half of the text the byte that does so most. */
export function mostTelling(sample) {
  const { size } = sample;
  let best = { layer: 0, head: 0, token: size - 1, score: -1 };
  sample.layers.forEach(({ heads }, layer) =>
    heads.slice(0, -1).forEach((weights, head) => {
      const far = Array.from({ length: size }, (_, query) =>
        weights.subarray(query * size, query * size + Math.max(0, query - FAR + 1)).reduce((a, b) => Math.max(a, b), 0),
      );
      const score = far.reduce((sum, weight) => sum + weight, 0);
      const late = far.slice(size >> 1);
      if (score > best.score) best = { layer, head, token: (size >> 1) + late.indexOf(Math.max(...late)), score };
    }),
  );
  return best;
}
