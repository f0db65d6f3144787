// From a weight to a colour, and to the text colour that can be read on it.

const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

/** Colours in even steps as a function of a weight from 0 to 1; the square root spreads out the small weights. */
export function ramp(stops) {
  const colours = stops.map(channels);
  return (weight) => {
    const place = Math.sqrt(Math.min(Math.max(weight, 0), 1)) * (colours.length - 1);
    const lower = Math.min(Math.floor(place), colours.length - 2);
    return colours[lower].map((low, i) => Math.round(low + (colours[lower + 1][i] - low) * (place - lower)));
  };
}

export const css = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

/** Black or white, whichever stands out more. One of the two always reaches a contrast of 4.5. */
export function readable(colour) {
  const [red, green, blue] = colour.map((c) => (c <= 10 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return luminance > 0.179 ? "#000" : "#fff";
}

/** The colours of the theme in use. */
export function theme(colours) {
  const dark = isDark();
  return { weight: ramp(dark ? colours.dark : colours.light), notAWeight: channels(colours.not_a_weight) };
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
