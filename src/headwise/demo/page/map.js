// Attention as pictures: one pixel per pair of bytes, small ones of all heads to choose from and a large one to read.

import { css } from "./colours.js";
import { draw, hideTipOnLeaving, make, showTip } from "./elements.js";
import { headName, isMean, sees } from "./weights.js";

/** Paint a head, a pixel per pair. What may not be seen stays clear, unless there is a weight on it all the same. */
export function paint(canvas, sample, layer, weights, colours) {
  const { size } = sample;
  canvas.width = canvas.height = size;
  const image = new ImageData(size, size);
  for (let query = 0; query < size; query++) {
    for (let key = 0; key < size; key++) {
      const weight = weights[query * size + key];
      const seen = sees(layer, query, key);
      if (!seen && weight === 0) continue;
      const colour = seen && !Number.isNaN(weight) ? colours.weight(weight) : colours.notAWeight;
      image.data.set([...colour, 255], 4 * (query * size + key));
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** The edge of the window and of the past, in units of bytes. */
function edges(layer, size) {
  const lines = draw("g", { class: "edges" });
  const { window } = layer;
  if (window !== null && window < size)
    lines.append(draw("line", { class: "window", x1: 0, y1: window, x2: size - window, y2: size }));
  return lines;
}

const overlay = (size) =>
  draw("svg", { viewBox: `0 0 ${size} ${size}`, preserveAspectRatio: "none", "aria-hidden": "true" });

/** All heads as a radio group: a row per layer, a column per head, the mean last. */
export function headGrid(place, sample, choose) {
  const columns = Math.max(...sample.layers.map((layer) => layer.heads.length));
  place.style.setProperty("--columns", columns);
  const buttons = sample.layers.map((layer, l) => {
    const row = layer.heads.map((_, h) => {
      const canvas = make("canvas");
      const mapped = make("span", { className: "map small" }, canvas);
      const lines = overlay(sample.size);
      lines.append(edges(layer, sample.size));
      mapped.append(lines);
      const button = make(
        "button",
        { type: "button", tabIndex: -1 },
        mapped,
        make("span", { className: "name" }, isMean(layer, h) ? "mean" : String(h + 1)),
      );
      button.setAttribute("role", "radio");
      button.setAttribute("aria-label", `${layer.name}, ${headName(layer, h)}`);
      button.addEventListener("click", () => choose(l, h));
      return button;
    });
    place.append(
      make("div", { className: "layer-name", ariaHidden: "true" }, layer.name),
      make("div", { className: "layer-row" }, ...row),
    );
    return row;
  });
  let chosen = { layer: 0, head: 0 };
  place.addEventListener("keydown", (event) => {
    const [down, right] =
      { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] ?? [];
    if (down === undefined) return;
    event.preventDefault();
    const layer = (chosen.layer + down + buttons.length) % buttons.length;
    const count = buttons[layer].length;
    const head = (Math.min(chosen.head, count - 1) + right + count) % count;
    choose(layer, head);
    buttons[layer][head].focus();
  });
  return {
    repaint(colours) {
      buttons.forEach((row, l) =>
        row.forEach((button, h) =>
          paint(button.querySelector("canvas"), sample, sample.layers[l], sample.layers[l].heads[h], colours),
        ),
      );
    },
    mark(layer, head) {
      chosen = { layer, head };
      buttons.forEach((row, l) =>
        row.forEach((button, h) => {
          button.setAttribute("aria-checked", l === layer && h === head);
          button.tabIndex = l === layer && h === head ? 0 : -1;
        }),
      );
    },
  };
}

/** The large map. Pointer and arrow keys read single pairs; a click or Enter chooses the row's byte. */
export function largeMap(place, sample, describe, choose) {
  const { size } = sample;
  const canvas = make("canvas");
  const lines = overlay(size);
  const row = draw("rect", { class: "row", x: 0, width: size, height: 1 });
  const cell = draw("g", { class: "cell", visibility: "hidden" });
  place.append(canvas, lines);
  let shown = { layer: 0, head: 0, token: 0 };
  let pair = null;

  function read(query, key) {
    pair = { query, key };
    cell.replaceChildren(
      draw("rect", { x: key, y: query, width: 1, height: 1 }),
      draw("path", { d: `M0 ${query + 0.5}H${key}M${key + 0.5} ${query + 1}V${size}` }),
    );
    cell.setAttribute("visibility", "visible");
    const box = canvas.getBoundingClientRect();
    const [x, y] = [box.left + ((key + 0.5) / size) * box.width, box.top + (query / size) * box.height];
    showTip(x, y, describe(query, key), () => cell.setAttribute("visibility", "hidden"));
  }

  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const index = (part, length) => Math.min(Math.max(Math.floor((part / length) * size), 0), size - 1);
    return [index(event.clientY - box.top, box.height), index(event.clientX - box.left, box.width)];
  };
  place.addEventListener("pointermove", (event) => read(...at(event)));
  place.addEventListener("click", (event) => {
    const [query, key] = at(event);
    choose(query);
    read(query, key);
  });
  hideTipOnLeaving(place);
  place.addEventListener("keydown", (event) => {
    const { query, key } = pair ?? { query: shown.token, key: shown.token };
    const moves = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      Home: [0, -size],
      End: [0, size],
    };
    if (event.key === "Enter" || event.key === " ") choose(query);
    else if (!(event.key in moves)) return;
    event.preventDefault();
    const [down, right] = moves[event.key] ?? [0, 0];
    const clamp = (index) => Math.min(Math.max(index, 0), size - 1);
    read(clamp(query + down), clamp(key + right));
  });
  return {
    show(layer, head, token, colours) {
      shown = { layer, head, token };
      const of = sample.layers[layer];
      paint(canvas, sample, of, of.heads[head], colours);
      row.setAttribute("y", token);
      lines.replaceChildren(edges(of, size), row, cell);
    },
  };
}

/** The colour scale, with its weights at their places. */
export function drawScale(place, colours) {
  const canvas = make("canvas", { width: 256, height: 1 });
  const context = canvas.getContext("2d");
  for (let x = 0; x < 256; x++) {
    context.fillStyle = css(colours.weight((x / 255) ** 2));
    context.fillRect(x, 0, 1, 1);
  }
  const marks = [0, 0.01, 0.05, 0.2, 0.5, 1].map((weight) => {
    const mark = make("span", {}, `${100 * weight}`);
    mark.style.left = `${100 * Math.sqrt(weight)}%`;
    return mark;
  });
  place.replaceChildren(canvas, make("div", { className: "marks", ariaHidden: "true" }, ...marks));
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", "Colour scale from weight 0 to weight 100 percent, small weights spread out");
}
