// The page: reads the data it carries, writes the facts, and shows the attention.

import { showAttention } from "./attention.js";
import { at, percent, whole } from "./elements.js";
import { writeComparison, writeFacts, writeSpeech } from "./facts.js";
import { writeLoss } from "./loss.js";
import { followTheme } from "./theme.js";
import { character, mostTelling, unpack } from "./weights.js";

const data = JSON.parse(at("data").textContent);
const repaints = [];

writeFacts(data.run);
writeLoss(data.run);
writeComparison(data.run);
writeSpeech(data.run);
if (data.sample) repaints.push(showSample(unpack(data.sample)));
else {
  at("attention").hidden = true;
  at("attention-about").textContent = "This run ended before it could look at its attention.";
}
followTheme(repaints);

function showSample(sample) {
  const windows = sample.layers.some((layer) => layer.window !== null);
  at("attention-about").textContent =
    `${whole(sample.size)} bytes of the text, seen by ${sample.layers.length} layers. ` +
    "Choose a byte: the stronger the colour of another, the more it looks at it." +
    (windows
      ? " Layers with a window see only the last bytes; hatched is what a byte may not see."
      : " Hatched is what a byte may not see: what comes after it.");
  return showAttention(sample, mostTelling(sample), data.colours, (layer, head) => {
    const { itself, before, spread } = character(layer.heads[head], sample.size);
    at("map-about").textContent =
      `On average ${percent(itself)} on the byte itself, ${percent(before)} on the one before; ` +
      `spread over about ${spread.toFixed(1)} bytes.`;
  });
}
