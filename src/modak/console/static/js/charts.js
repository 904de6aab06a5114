// Charts as SVG drawn here: each has a sentence for those who cannot see it, and no colour carries meaning alone.

import { s, h } from "./dom.js";
import { bytes, count, many, seconds } from "./format.js";

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** Heap and lake of a table as one bar: the lake on the left, the cut-line, the heap on the right. */
export function seamBar(lake, heap, label) {
  const whole = Math.max(1, (lake ?? 0) + (heap ?? 0));
  const cut = clamp(((lake ?? 0) / whole) * 300, lake ? 4 : 0, heap ? 296 : 300);
  const words = `${bytes(lake ?? 0)} in the lake, ${bytes(heap ?? 0)} in the heap${label ? `, cut-line at ${label}` : ""}`;
  return s("svg", { viewBox: "0 0 300 18", role: "img", "aria-label": words, width: "100%", height: 18, preserveAspectRatio: "none" },
    s("title", {}, words),
    s("rect", { class: "lake", x: 0, y: 3, width: cut, height: 12, rx: 2 }),
    s("rect", { class: "heap", x: cut, y: 3, width: 300 - cut, height: 12, rx: 2 }),
    s("line", { class: "cut", x1: cut, x2: cut, y1: 0, y2: 18 }));
}

/** Partitions along the tier-key axis, coloured by where their rows are; `words` has the lines as people write them. */
export function axisOf(partitions, cut, floor, words) {
  const placed = partitions.filter((part) => part.lower !== null && part.upper !== null);
  if (!placed.length) return h("p", { class: "empty" }, "No partition with bounds.");
  const low = Math.min(...placed.map((part) => Number(part.lower)));
  const high = Math.max(...placed.map((part) => Number(part.upper)));
  const x = (key) => ((Number(key) - low) / Math.max(1, high - low)) * 1000;
  const look = { hot: "heap", sealing: "heap", tiering: "heap", tiered: "both", dropped: "lake" };
  const ends = [placed.find((part) => Number(part.lower) === low), placed.find((part) => Number(part.upper) === high)];
  const from = ends[0].lower_text ?? low, to = ends[1].upper_text ?? high;
  const said = `${many(placed.length, "partition")} from ${from} to ${to}; ` + Object.entries(tally(placed)).map(([state, n]) => `${n} ${state}`).join(", ");
  const expired = (part) => floor !== null && floor !== undefined && Number(part.upper) <= Number(floor);
  return h("figure", { class: "axis" },
    s("svg", { viewBox: "0 0 1000 64", role: "img", "aria-label": said, width: "100%", height: 64, preserveAspectRatio: "none" },
      placed.map((part) => s("rect", { class: expired(part) ? "gone" : look[part.state] ?? "gone", x: x(part.lower), y: 16, width: Math.max(1.5, x(part.upper) - x(part.lower) - 1), height: 26, rx: 2 },
        s("title", {}, `${part.name}: ${part.state}, ${part.lower_text ?? part.lower} to ${part.upper_text ?? part.upper}`))),
      line(cut, "cut"), line(floor, "axis")),
    h("div", { class: "ends", "aria-hidden": "true" }, h("span", {}, from), h("span", {}, to)),
    h("figcaption", { class: "legend" },
      placed.some(expired) ? h("span", {}, "expired") : null, h("span", { class: "lake" }, "in the lake"), h("span", { class: "both" }, "in the lake, heap copy still there"), h("span", { class: "heap" }, "in the heap"),
      words.cut ? h("span", { class: "plain" }, `cut-line ${words.cut}`) : null, words.floor ? h("span", { class: "plain" }, `retention line ${words.floor}`) : null));

  function line(key, kind) {
    if (key === null || key === undefined) return null;
    const here = clamp(x(key), 1, 999);
    return s("line", { class: kind, x1: here, x2: here, y1: 6, y2: 56 }, s("title", {}, String(key)));
  }
}

function tally(rows) {
  const found = {};
  for (const row of rows) found[row.state] = (found[row.state] ?? 0) + 1;
  return found;
}

/** Columns by name, such as files by size. */
export function columns(pairs, title, empty) {
  if (empty && !pairs.some(([, value]) => value)) return h("p", { class: "empty" }, empty);
  const most = Math.max(1, ...pairs.map(([, value]) => value));
  const wide = Math.min(104, 520 / Math.max(1, pairs.length));
  const words = `${title}: ` + pairs.map(([name, value]) => `${name} ${count(value)}`).join(", ");
  return s("svg", { class: "chart", viewBox: "0 0 520 210", role: "img", "aria-label": words, width: "100%" },
    pairs.map(([name, value], place) => {
      const tall = (value / most) * 150;
      return s("g", {},
        s("rect", { class: "lake", x: place * wide + wide * .15, y: 170 - tall, width: wide * .7, height: Math.max(tall, value ? 2 : 0), rx: 3 }, s("title", {}, `${name}: ${count(value)}`)),
        s("text", { x: place * wide + wide / 2, y: 164 - tall, "text-anchor": "middle" }, count(value)),
        s("text", { x: place * wide + wide / 2, y: 200, "text-anchor": "middle" }, name));
    }));
}

/** Values over time; a series is {name, points: [[milliseconds, value], …]}. */
export function lines(series, unit, title) {
  const show = unit === "bytes" ? bytes : unit === "seconds" ? seconds : count;
  const points = series.flatMap((one) => one.points);
  if (points.length < 2) return h("p", { class: "empty" }, "Not enough measured yet. A point is taken every 20 seconds.");
  const from = Math.min(...points.map(([when]) => when)), until = Math.max(...points.map(([when]) => when));
  const most = Math.max(...points.map(([, value]) => value), 1e-9);
  const x = (when) => 70 + ((when - from) / Math.max(1, until - from)) * 440;
  const y = (value) => 170 - (value / most) * 150;
  const last = (one) => one.points[one.points.length - 1]?.[1];
  const words = `${title}: ` + series.map((one) => `${one.name} now ${show(last(one))}`).join(", ") + `; at most ${show(most)}`;
  return h("figure", { class: "axis" },
    s("svg", { class: "chart", viewBox: "0 0 520 200", role: "img", "aria-label": words, width: "100%" },
      [0, .5, 1].map((part) => s("g", {},
        s("line", { class: "axis", x1: 70, x2: 510, y1: y(most * part), y2: y(most * part) }),
        s("text", { x: 64, y: y(most * part) + 4, "text-anchor": "end" }, show(most * part)))),
      s("text", { x: 70, y: 194 }, new Date(from).toISOString().slice(11, 19)),
      s("text", { x: 510, y: 194, "text-anchor": "end" }, new Date(until).toISOString().slice(11, 19)),
      series.map((one, place) => s("polyline", { class: `line n${place}`, points: one.points.map(([when, value]) => `${x(when).toFixed(1)},${y(value).toFixed(1)}`).join(" ") },
        s("title", {}, one.name)))),
    h("figcaption", { class: "legend" }, series.map((one, place) => h("span", { class: ["lake", "heap"][place] ?? `n${place}` }, `${one.name}: ${show(last(one))}`))));
}

/** Snapshots and pins on one time line. */
export function timeline(snapshots, pins) {
  const moments = [...snapshots.map((one) => Date.parse(one.at)), ...pins.map((one) => Date.parse(one.since)), Date.now()];
  if (!snapshots.length) return h("p", { class: "empty" }, "No snapshot yet.");
  const from = Math.min(...moments), until = Math.max(...moments);
  const x = (when) => 10 + ((when - from) / Math.max(1, until - from)) * 500;
  const words = `${many(snapshots.length, "snapshot")} since ${new Date(from).toISOString()}, ${many(pins.length, "pin")}`;
  return h("figure", { class: "axis" },
    s("svg", { class: "chart", viewBox: "0 0 520 90", role: "img", "aria-label": words, width: "100%" },
      s("line", { class: "axis", x1: 10, x2: 510, y1: 40, y2: 40 }),
      snapshots.map((one) => s("circle", { class: "snapshot", cx: x(Date.parse(one.at)), cy: 40, r: one.current ? 7 : 4 }, s("title", {}, `${one.id} ${one.operation ?? ""} ${one.at}`))),
      pins.map((one) => s("rect", { class: "pin", x: x(Date.parse(one.since)), y: 56, width: Math.max(4, x(Date.now()) - x(Date.parse(one.since))), height: 8, rx: 3 }, s("title", {}, `${one.holder} since ${one.since}`))),
      s("text", { x: 10, y: 86 }, new Date(from).toISOString().slice(0, 19).replace("T", " ")),
      s("text", { x: 510, y: 86, "text-anchor": "end" }, "now")),
    h("figcaption", { class: "legend" }, h("span", { class: "lake" }, "snapshot (large: the published one)"), h("span", { class: "pin" }, "reader's pin")));
}
