// The text itself, byte by byte: choose one, and the colours of the others say how much it looks at them.

import { css, readable } from "./colours.js";
import { at, hideTip, make, percent, showTip } from "./elements.js";
import { glyph, nameOf } from "./glyphs.js";
import { sees, strongest } from "./weights.js";

const AROUND = 14; // bytes shown on each side of one that is spoken of

/** A byte among its neighbours. */
export function inContext(tokens, index) {
  const text = (from, to) =>
    tokens
      .slice(Math.max(0, from), Math.max(0, to))
      .map((byte) => glyph(byte).text)
      .join("");
  // Padded, so that such bytes stand below each other.
  const [before, after] = [text(index - AROUND, index).padStart(AROUND), text(index + 1, index + 1 + AROUND)];
  return make("span", { className: "context" }, before, make("mark", {}, glyph(tokens[index]).text), after);
}

/** The label of a pair of bytes. */
export function describePair(sample, layer, head, query, key) {
  const weight = layer.heads[head][query * sample.size + key];
  const { tokens } = sample;
  const sentence = make(
    "div",
    {},
    make("b", {}, nameOf(tokens[query])),
    make("span", { className: "dim" }, ` at ${query} → `),
    make("b", {}, nameOf(tokens[key])),
    make("span", { className: "dim" }, ` at ${key}`),
  );
  let value = Number.isNaN(weight) ? "not a weight" : percent(weight);
  if (!sees(layer, query, key)) {
    const why = key > query ? "comes later" : "outside of the window";
    value = weight === 0 ? `not seen: ${why}` : `${value}, though it ${key > query ? why : "is " + why}`;
  }
  const lines = [sentence, make("div", { className: "weight" }, value)];
  if (sees(layer, query, key)) lines.push(inContext(tokens, query), inContext(tokens, key));
  return lines;
}

/** The strip as a listbox. choose(index) is called for what is clicked or reached by keys. */
export function tokenStrip(place, sample, describe, choose) {
  const cells = sample.tokens.map((byte, i) => {
    const { text, kind } = glyph(byte);
    const cell = make("span", { id: `token-${i}`, className: `token ${kind}` }, text);
    cell.setAttribute("role", "option");
    cell.setAttribute("aria-label", `${nameOf(byte)}, ${i}`);
    cell.dataset.index = i;
    return cell;
  });
  place.append(...cells);
  let chosen = 0;
  const indexOf = (event) => event.target.closest?.(".token")?.dataset.index;

  const tell = (index) => {
    const box = cells[index].getBoundingClientRect();
    showTip(box.left + box.width / 2, box.top, describe(chosen, index));
  };
  place.addEventListener("click", (event) => {
    const index = indexOf(event);
    if (index !== undefined) choose(Number(index));
  });
  place.addEventListener("pointermove", (event) => {
    const index = indexOf(event);
    if (index === undefined || event.pointerType === "touch") hideTip();
    else tell(Number(index));
  });
  place.addEventListener("pointerleave", hideTip);
  place.addEventListener("keydown", (event) => {
    const next = {
      ArrowLeft: chosen - 1,
      ArrowRight: chosen + 1,
      Home: 0,
      End: cells.length - 1,
      ArrowUp: onLine(-1),
      ArrowDown: onLine(1),
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(Math.min(Math.max(next, 0), cells.length - 1));
  });

  /** The cell above or below the chosen one, as it is laid out now. */
  function onLine(direction) {
    const boxes = cells.map((cell) => cell.getClientRects()[0]);
    const here = boxes[chosen];
    const beyond = boxes
      .map((box, index) => ({ index, away: (box.top - here.top) * direction, aside: Math.abs(box.left - here.left) }))
      .filter(({ away }) => away > here.height / 2);
    const nearest = Math.min(...beyond.map(({ away }) => away));
    const line = beyond.filter(({ away }) => away < nearest + here.height / 2).sort((a, b) => a.aside - b.aside);
    return line[0]?.index ?? chosen;
  }

  return {
    show(layer, head, token, colours) {
      cells[chosen].setAttribute("aria-selected", "false");
      chosen = token;
      cells[chosen].setAttribute("aria-selected", "true");
      place.setAttribute("aria-activedescendant", `token-${token}`);
      const row = layer.heads[head].subarray(token * sample.size, (token + 1) * sample.size);
      cells.forEach((cell, key) => {
        const seen = sees(layer, token, key) || row[key] !== 0;
        const wrong = Number.isNaN(row[key]) || (seen && !sees(layer, token, key));
        const colour = wrong ? colours.notAWeight : colours.weight(row[key]);
        cell.classList.toggle("unseen", !seen);
        cell.style.backgroundColor = seen ? css(colour) : "";
        cell.style.color = seen ? readable(colour) : "";
      });
      at("chosen").replaceChildren(make("b", {}, nameOf(sample.tokens[token])), ` at ${token}`);
      const most = strongest(row, 5);
      at("most").replaceChildren(
        ...most.map(({ weight, key }) => {
          const bar = make("span", { className: "bar" });
          bar.style.width = `${100 * weight}%`;
          bar.style.backgroundColor = css(colours.weight(weight));
          return make(
            "li",
            {},
            make("span", { className: "what" }, inContext(sample.tokens, key)),
            make("span", { className: "track" }, bar),
            make("span", { className: "value" }, percent(weight)),
          );
        }),
      );
    },
  };
}
