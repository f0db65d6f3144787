// The WGSL of a program, to read.

import { at, make } from "./elements.js";

export function showSource(keys, shaders) {
  const choice = at("source-choice");
  const show = () => (at("source-text").textContent = shaders[choice.value].text);
  choice.replaceChildren(...[...new Set(keys)].map((key) => make("option", { value: key }, key)));
  choice.onchange = show;
  show();
  at("source").showModal();
}
