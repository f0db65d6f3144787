// Loss curves as SVG, drawn anew for every width so that the lettering keeps its size.

import { at, draw, hideTipOnLeaving, make, showTip, small, whole } from "./elements.js";

const EDGE = { top: 26, right: 12, bottom: 38, left: 34 };
const UNIFORM = Math.log(256); // the loss of knowing nothing about a byte

/** Round numbers between two others, about as many as asked for. */
export function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}

const lossAt = (curve, step) => curve?.losses[step - curve.first_step];

/** A chart of our curve and the plain one in a figure, for steps from up to, but without, to. */
export function lossChart(figure, caption, ours, plain, from, to) {
  const place = figure.querySelector(".chart");
  figure.querySelector("figcaption").textContent = caption;
  place.tabIndex = 0;
  place.setAttribute("role", "application");
  let across, down, cursor;
  let step = to - 1;

  function paint() {
    const width = Math.max(place.clientWidth, 160);
    const height = innerWidth < 480 ? 230 : 290;
    const shown = [ours, plain].flatMap((curve) =>
      curve ? curve.losses.slice(Math.max(0, from - curve.first_step), Math.max(0, to - curve.first_step)) : [],
    );
    let low = Math.min(...shown.slice(0, 1), UNIFORM);
    let high = UNIFORM;
    for (const loss of shown) [low, high] = [Math.min(low, loss), Math.max(high, loss)];
    [low, high] = [low - 0.05 * (high - low || 1), high + 0.05 * (high - low || 1)];
    const span = Math.max(to - 1 - from, 1);
    across = (at) => EDGE.left + ((width - EDGE.left - EDGE.right) * (at - from)) / span;
    down = (loss) => EDGE.top + ((height - EDGE.top - EDGE.bottom) * (high - loss)) / (high - low);
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (const loss of ticks(low, high, height / 55)) {
      svg.append(
        draw("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: down(loss), y2: down(loss) }),
      );
      svg.append(
        draw(
          "text",
          { class: "tick", x: EDGE.left - 8, y: down(loss), dy: "0.35em", "text-anchor": "end" },
          String(loss),
        ),
      );
    }
    for (const at of ticks(from, from + span, Math.min(width / 80, span)).filter(Number.isInteger)) {
      svg.append(
        draw(
          "text",
          { class: "tick", x: across(at), y: height - EDGE.bottom + 16, "text-anchor": "middle" },
          whole(at),
        ),
      );
    }
    svg.append(draw("text", { class: "axis", x: width - EDGE.right, y: height - 4, "text-anchor": "end" }, "step"));
    svg.append(draw("text", { class: "axis", x: 0, y: 10 }, "nats per byte"));
    svg.append(
      draw("line", { class: "uniform", x1: EDGE.left, x2: width - EDGE.right, y1: down(UNIFORM), y2: down(UNIFORM) }),
    );
    svg.append(
      draw(
        "text",
        { class: "axis", x: width - EDGE.right, y: down(UNIFORM) - 5, "text-anchor": "end" },
        "ln 256: every byte alike",
      ),
    );
    if (plain) svg.append(line(plain, "plain"));
    svg.append(line(ours, "ours"));
    cursor = draw("g", { class: "cursor", visibility: "hidden" });
    svg.append(cursor);
    place.replaceChildren(svg);
  }

  function line(curve, kind) {
    const points = curve.losses.map((loss, i) => [curve.first_step + i, loss]).filter(([at]) => at >= from && at < to);
    if (points.length === 1)
      return draw("circle", {
        class: `dot ${kind}`,
        cx: across(points[0][0]),
        cy: down(points[0][1]),
        r: kind === "plain" ? 7 : 3.5,
      });
    return draw("polyline", {
      class: `line ${kind}`,
      points: points.map(([at, loss]) => `${across(at).toFixed(2)},${down(loss).toFixed(2)}`).join(" "),
    });
  }

  function read(wanted) {
    step = Math.min(Math.max(Math.round(wanted), from), to - 1);
    const [our, their] = [lossAt(ours, step), lossAt(plain, step)];
    const x = across(step);
    cursor.replaceChildren(draw("line", { x1: x, x2: x, y1: EDGE.top, y2: place.clientHeight - EDGE.bottom }));
    for (const loss of [our, their])
      if (loss !== undefined) cursor.append(draw("circle", { cx: x, cy: down(loss), r: 3.5 }));
    cursor.setAttribute("visibility", "visible");
    const box = place.getBoundingClientRect();
    const rows = [];
    if (our !== undefined)
      rows.push(
        make("div", {}, make("i", { className: "swatch ours" }), `${ours.name} `, make("b", {}, our.toFixed(4))),
      );
    if (their !== undefined)
      rows.push(
        make("div", {}, make("i", { className: "swatch plain" }), `${plain.name} `, make("b", {}, their.toFixed(4))),
      );
    if (our !== undefined && their !== undefined)
      rows.push(make("div", { className: "dim" }, `difference ${small(Math.abs(our - their))}`));
    const content = [make("div", { className: "dim" }, `step ${whole(step)}`), ...rows];
    showTip(box.left + x, box.top + down(our ?? their ?? UNIFORM), content, () =>
      cursor.setAttribute("visibility", "hidden"),
    );
  }

  const pointed = (event) => {
    const box = place.getBoundingClientRect();
    read(
      from +
        ((event.clientX - box.left - EDGE.left) / (box.width - EDGE.left - EDGE.right)) * Math.max(to - 1 - from, 1),
    );
  };
  place.addEventListener("pointermove", pointed);
  place.addEventListener("pointerdown", pointed);
  hideTipOnLeaving(place);
  place.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    read(step + by);
  });
  new ResizeObserver(paint).observe(place);
  paint();
}

export function writeLoss(run) {
  const { curve, plain } = run;
  const [from, to] = [curve.first_step, curve.first_step + curve.losses.length];
  const about = at("loss-about");
  if (curve.losses.length === 0) {
    about.textContent = "No step was finished, so there is no curve.";
    at("loss-whole").hidden = at("loss-first").hidden = true;
    return;
  }
  const legend = (kind, name) =>
    make("span", { className: "legend" }, make("i", { className: `swatch ${kind}` }), name);
  about.append("The loss of every step. ", legend("ours", curve.name));
  if (plain)
    about.append(
      " and beneath it, broad and pale, the same model from the same start on ordinary ops, ",
      legend("plain", plain.name),
      ".",
    );
  else about.append(". The same model on plain PyTorch ops was not trained in this run.");
  if (curve.losses.length === 1) about.append(" There was only one step: a dot.");
  const range = (first, past) =>
    past - first === 1 ? `Step ${whole(first)}` : `Steps ${whole(first)} to ${whole(past - 1)}`;
  lossChart(at("loss-whole"), `The whole run`, curve, plain, from, to);
  label(at("loss-whole"), curve, from, to);
  // A closer look, where plain PyTorch covers only the beginning.
  const start = plain ? plain.first_step : 0;
  const end = plain ? plain.first_step + plain.losses.length : 0;
  const closer = plain !== null && end > start && (end < to || start > from);
  at("loss-first").hidden = !closer;
  if (closer) {
    lossChart(at("loss-first"), `${range(start, end)}, closer`, curve, plain, start, end);
    label(at("loss-first"), plain, start, end);
  }
}

function label(figure, curve, from, to) {
  const [first, last] = [lossAt(curve, from), lossAt(curve, to - 1)];
  const said = `Loss from step ${from} to step ${to - 1}: from ${first.toFixed(3)} to ${last.toFixed(3)} nats per byte.`;
  figure.querySelector(".chart").setAttribute("aria-label", `${said} Arrow keys read the steps.`);
}
