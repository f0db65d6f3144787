// Light or dark.

import { isDark } from "./colours.js";
import { at } from "./elements.js";

/** As the system has it, until the button says otherwise; what it said is remembered. `repaints` are called at every change. */
export function followTheme(repaints) {
  const button = at("theme");
  const apply = () => {
    button.setAttribute("aria-pressed", isDark());
    button.textContent = isDark() ? "☀ Light" : "☾ Dark";
    button.setAttribute(
      "aria-label",
      isDark() ? "Dark colours are on; switch to light" : "Light colours are on; switch to dark",
    );
    for (const repaint of repaints) repaint();
  };
  const stored = (action) => {
    try {
      return action(localStorage);
    } catch {
      return null; // no storage here: the system's choice, until the page is closed
    }
  };
  const remembered = stored((storage) => storage.getItem("headwise-theme"));
  if (remembered === "dark" || remembered === "light") document.documentElement.dataset.theme = remembered;
  button.addEventListener("click", () => {
    const chosen = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = chosen;
    stored((storage) => storage.setItem("headwise-theme", chosen));
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}
