// One head: how a statistic is distributed over documents, and the documents in which it is strongest.

import { nameOf, usedBins } from "./atlas_numbers.js";
import { element, sized, styleOf } from "./page_dom.js";
import { counted, readable } from "./page_numbers.js";
import { inkOn, shareOf, stepOf } from "./page_scale.js";

const HEIGHT = 110, AXIS = 18;
const LISTED = 5, LEAST = 0.0005;

/** Draw the histogram of a head for each folder; return it in words. */
export function drawDistribution(canvas, now) {
  const { root, data, table, state } = now, at = state.statistic, [first, last] = usedBins(table, at);
  const width = canvas.parentElement.clientWidth, context = sized(canvas, width, HEIGHT), { edges, of } = table;
  const ink = styleOf(root, "--ink"), quiet = styleOf(root, "--quiet"), line = styleOf(root, "--line"), step = width / (last - first);
  const shares = of.map(({ histogram, count }) => histogram[state.head][at].slice(first, last).map((one) => one / Math.max(1, count[state.head][at])));
  const most = Math.max(1e-9, ...shares.flat()), floor = HEIGHT - AXIS, bar = Math.max(1, (step - 1) / of.length);
  const place = (value) => (Math.log10(value / edges[0]) * (edges.length - 1) / Math.log10(edges.at(-1) / edges[0]) + 1 - first) * step;
  shares.forEach((values, folder) => {
    context.fillStyle = data.colours[now.theme].heads[folder];
    values.forEach((share, bin) => context.fillRect(bin * step + folder * bar, floor - (share / most) * (floor - 4), bar, (share / most) * (floor - 4)));
    const mean = of[folder].mean[state.head][at];
    if (!(mean > 0)) return;
    context.fillStyle = ink;
    context.fillRect(place(mean) - 0.5, 0, 1, floor);
  });
  context.fillStyle = line;
  context.fillRect(0, floor, width, 1);
  context.fillStyle = quiet;
  context.font = "11px system-ui, sans-serif";
  const ends = [first ? edges[first - 1] : 0, last <= edges.length ? edges[last - 1] : Infinity];
  context.textAlign = "left";
  context.fillText(readable(ends[0]), 0, HEIGHT - 4);
  context.textAlign = "right";
  context.fillText(readable(ends[1]), width, HEIGHT - 4);
  context.textAlign = "center";
  for (const tick of edges) {
    const x = place(tick);
    if (Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-6 && x > 45 && x < width - 45) context.fillText(readable(tick), x, HEIGHT - 4);
  }
  const said = of.map(({ count, mean, deviation }, folder) => {
    const [documents, value, spread] = [count, mean, deviation].map((one) => one[state.head][at]);
    const numbers = value === null ? "" : `: mean ${readable(value)}${spread === null ? "" : `, standard deviation ${readable(spread)}`}`;
    return `${of.length > 1 ? `${data.names[folder]}: ` : ""}${counted(documents, "document")}${numbers}`;
  });
  canvas.setAttribute("aria-label", `Distribution of ${table.statistics[at]} in head ${nameOf(table, state.head)}, on a logarithmic axis. ${said.join("; ")}.`);
  return said;
}

/** The elements of the strongest documents of a head: [value, id, query, at_query, start, tokens, keys, key_tokens, weights]. */
export function examplesOf(now, examples) {
  const { state, table } = now, key = `${table.heads[state.head][1]} ${table.statistics[state.statistic]}`;
  const found = examples?.[key] ?? [];
  if (!found.length) return [element("p", { class: "quiet" }, "The page has no example of it.")];
  return [element("ol", { class: "examples" }, ...found.map((one) => exampleOf(now, one)))];
}

function exampleOf(now, [value, id, query, there, start, tokens, keys, keyTokens, weights]) {
  const { ramp } = now.data.colours[now.theme], weightAt = new Map(keys.map((key, at) => [key, weights[at]]));
  // With fewer keys than are kept, all with a weight are there.
  const left = keys.length < now.data.strongest ? 0 : 1 - weights.reduce((sum, one) => sum + one, 0), isCut = left > LEAST;
  const text = tokens.map((token, at) => {
    const weight = weightAt.get(start + at) ?? 0, isQuery = start + at === query;
    const isLeft = isCut && !weightAt.has(start + at);
    const made = element("span", { class: `token${isQuery ? " focus" : ""}${isLeft ? " unkept" : ""}`, title: `${start + at}${isQuery ? ", the query" : ""}${weight ? `: ${readable(weight)}` : isLeft ? ": not kept" : ""}` }, token);
    if (weight > 0) {
      const colour = ramp[stepOf(shareOf(weight, 1, "sqrt"), ramp.length)];
      Object.assign(made.style, { background: colour, color: inkOn(colour) });
    }
    return made;
  });
  const looked = keys.slice(0, LISTED).flatMap((key, at) => (weights[at] > 0 ? [at ? ", " : "", element("bdi", {}, keyTokens[at]), ` (${key}) ${readable(weights[at])}`] : []));
  return element("li", {},
    element("p", { class: "about" }, element("b", {}, readable(value)), " ", element("bdi", {}, id), `; ${readable(there)} at token ${query}`),
    element("p", { class: "passage", dir: "auto" }, ...text),
    element("p", { class: "quiet" }, `Token ${query} looks at `, ...looked, ...(isCut ? [`; the tokens that were not kept have ${readable(100 * left)} %, none more than ${readable(weights.at(-1))}`] : [])));
}

/** The one scale of all examples, of every head and folder. */
export function scaleOfExamples(now) {
  const { ramp } = now.data.colours[now.theme], bar = element("span", { class: "ramp", "aria-hidden": "true" });
  bar.style.background = `linear-gradient(to right, ${ramp.join(", ")})`;
  return element("p", { class: "scale" }, "weight 0 ", bar, ` 1, by its square root, alike in every example; `, element("span", { class: "token unkept" }, "striped"), ` not among the ${now.data.strongest} that were kept`);
}
