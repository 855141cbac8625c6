"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const state = { data: null, layer: "all", at: {}, open: null, paused: false, key: "", stop: null };

// Everything from the router is set as text or as an attribute value: never as markup.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  return fill(node, attributes, children);
}
function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}
const number = (x, digits = 3) => x === null || x === undefined ? "–"
  : Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(digits)));
const fixed = (x, digits) => x === null || x === undefined ? "–" : x.toFixed(digits);
const percent = (x) => (x < 0 ? "−" : "") + number(Math.abs(100 * x), 2) + " %";
const signed = (x) => (x > 0 ? "+" : "") + percent(x);
const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB");
const short = (name) => String(name).replace(/^https?:\/\//, "");
const micro = (us) => us === null || us === undefined ? "–"
  : us < 1000 ? number(us) + " µs" : number(us / 1000) + " ms";
const color = (i) => `var(--c${i % 7})`;
function say(id, why) {
  $(id).textContent = why || "";
  $(id).hidden = !why;
}

function card(id, big, small, lines) {
  const nodes = [el("div", { class: "big" }, big, small ? el("small", {}, " " + small) : null)];
  for (const line of lines) if (line) nodes.push(line instanceof Node ? line : el("p", {}, line));
  $(id).lastElementChild.replaceChildren(...nodes);
}
function numbers(n, experts) {
  const x = n.experts, lines = [];
  if (x.saving !== null) {
    const word = x.saving >= 0 ? "fewer" : "more";
    lines.push(el("p", {}, el("span", { class: "saving" }, percent(Math.abs(x.saving)) + ` ${word} than ${x.shadow.policy}`),
      el("span", { class: "tag " + x.basis }, x.basis)));
    lines.push(`expected ${fixed(x.expected, 1)} against ${fixed(x.shadow.expected, 1)} in the shadow's world`);
  }
  for (const m of x.measured) {
    const text = m.relative === null ? `A/B ${m.name}: ${m.verdict}`
      : `A/B ${m.name} against ${m.against}: TPOT ${signed(m.relative)}` + (m.ci95 ? ` (${m.ci95.map(signed).join(" to ")})` : "") + `, ${m.verdict}`;
    lines.push(el("p", {}, text, el("span", { class: "tag measured" }, "measured")));
  }
  card("n-experts", fixed(x.realised, 1), experts ? `of ${experts} realised` : "realised", lines.concat(x.notes));
  const e = n.error;
  card("n-error", e.mae === null ? "–" : "± " + number(e.mae), e.mae === null ? "" : "experts (MAE)",
    [e.why, e.n ? `bias ${e.bias > 0 ? "+" : e.bias < 0 ? "−" : ""}${number(Math.abs(e.bias))}, correlation ${e.correlation === null ? "not defined yet" : fixed(e.correlation, 2)}, ${e.n} intervals` : null]);
  const d = n.decision;
  card("n-decision", micro(d.p99_us), "", [d.why, d.n ? `p50 ${micro(d.p50_us)} over ${d.n.toLocaleString("en")} decisions` : null]);
  const s = n.skew;
  card("n-skew", s.max_over_mean === null ? "–" : fixed(s.max_over_mean, 2), "",
    [s.why, s.why ? null : `${number(s.max)} on ${short(s.worker)}, mean ${number(s.mean)}`, s.why ? null : s.unit]);
}

// Values from -1 (below) over 0 (cold) to 1 (hot), a pixel each.
function paint(canvas, values) {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(name).trim().match(/\w\w/g).map((h) => parseInt(h, 16));
  const zero = rgb("--cold"), above = rgb("--hot"), below = rgb("--below");
  canvas.width = values.length;
  canvas.height = 1;
  const context = canvas.getContext("2d"), image = context.createImageData(values.length, 1);
  values.forEach((v, i) => {
    const end = v < 0 ? below : above;
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = Math.round(zero[c] + (end[c] - zero[c]) * Math.abs(v));
    image.data[4 * i + 3] = 255;
  });
  context.putImageData(image, 0, 0);
}
const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const levels = (h) => Array.from(h.cells, (c) => DIGITS.indexOf(c));
// Experts by the worker that reads them most, then by how often it does.
function grouped(h, cells) {
  const column = [...Array(h.experts).keys()].map((e) => {
    const values = h.workers.map((_, w) => cells[w * h.experts + e]), most = Math.max(...values);
    return { e, most, home: values.indexOf(most) };
  });
  return column.sort((a, b) => a.home - b.home || b.most - a.most || a.e - b.e).map((c) => c.e);
}
// What is painted: shares of steps, or how far they are from the mean of the workers.
function shades(h, cells) {
  if (!$("contrast").checked) return { of: cells.map((c) => c / 63), ends: ["never", "in every step"], low: 0 };
  const count = h.workers.length;
  const mean = [...Array(h.experts).keys()].map((e) => h.workers.reduce((sum, _, w) => sum + cells[w * h.experts + e], 0) / count);
  const far = cells.map((c, i) => c - mean[i % h.experts]), most = Math.max(...far.map(Math.abs), 1);
  const points = fixed(100 * most / 63, 0);
  return { of: far.map((d) => d / most), ends: [`${points} points rarer than the mean`, `${points} points more often`], low: -1 };
}
function heat(h) {
  say("heat-why", h.why);
  $("heat-box").hidden = $("heat-tools").hidden = Boolean(h.why);
  if (h.why) return;
  const live = state.data.source.kind === "live", select = $("layer");
  const layers = ["all", ...(live ? Array(h.layers).keys() : Object.keys(state.data.layers || {}))].map(String);
  if (select.options.length !== layers.length) {
    select.replaceChildren(...layers.map((l) => el("option", { value: l }, l === "all" ? "all (mean)" : l)));
    select.value = state.layer;
  }
  select.disabled = layers.length < 2;
  const cells = levels(h), shade = shades(h, cells);
  const order = $("sorted").checked ? grouped(h, cells) : [...Array(h.experts).keys()];
  const grid = $("heat-grid"), active = document.activeElement, kept = active && active.dataset ? active.dataset.row : null;
  const nodes = [el("span", { class: "head" }, "worker"), el("span", { class: "head" }, `${h.experts} experts, ` + ($("sorted").checked ? "grouped by the worker that reads them most" : "by number")), el("span", { class: "head" }, "distinct per step")];
  h.workers.forEach((name, w) => {
    const row = order.map((e) => shade.of[w * h.experts + e]), at = Math.min(state.at[name] || 0, h.experts - 1);
    const label = `${short(name)}: ${number(h.distinct[w])} of ${h.experts} experts per step, ${h.steps[w]} steps. Arrow keys read single experts.`;
    const canvas = el("canvas", { class: "map", role: "slider", tabindex: 0, "data-row": w, "aria-label": label, "aria-valuemin": 0, "aria-valuemax": h.experts - 1, "aria-valuenow": at, "aria-valuetext": cell(h, cells, w, order[at]) });
    paint(canvas, row);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      point(canvas, h, cells, w, order, Math.floor((event.clientX - box.left) / box.width * h.experts));
    });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -h.experts, End: h.experts }[event.key];
      if (!step) return;
      event.preventDefault();
      point(canvas, h, cells, w, order, Number(canvas.getAttribute("aria-valuenow")) + step);
    });
    nodes.push(el("span", { class: "name", title: name }, short(name)), canvas, el("span", {}, h.steps[w] ? number(h.distinct[w]) : "no steps"));
  });
  grid.replaceChildren(...nodes);
  if (kept) grid.querySelector(`canvas[data-row="${Number(kept)}"]`)?.focus();
  paint($("scale"), [...Array(64).keys()].map((i) => shade.low + (1 - shade.low) * i / 63));
  $("scale-low").textContent = shade.ends[0];
  $("scale-high").textContent = shade.ends[1];
  $("heat-note").textContent = (state.data.source.window || "") + (h.left_out ? `; ${h.left_out} more workers not shown` : "");
}
function cell(h, cells, w, expert) {
  const level = cells[w * h.experts + expert], name = short(h.workers[w]);
  if (level === 0) return `${name} never read expert ${expert}`;
  return `${name} read expert ${expert} in ` + (level === 63 ? "every step" : `about ${fixed(100 * level / 63, 0)} % of its steps`);
}
function point(canvas, h, cells, w, order, at) {
  const where = Math.max(0, Math.min(h.experts - 1, at)), text = cell(h, cells, w, order[where]);
  state.at[h.workers[w]] = where;
  canvas.setAttribute("aria-valuenow", where);
  canvas.setAttribute("aria-valuetext", text);
  $("heat-readout").textContent = text;
}

function ticks(low, high) {
  const raw = (high - low) / 6 || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw), out = [];
  for (let t = Math.ceil(low / step) * step; t <= high + 1e-9; t += step) out.push(Number(t.toPrecision(6)));
  return out;
}
function scatter(pairs, why) {
  say("scatter-why", pairs.length ? "" : why);
  if (!pairs.length) return $("scatter").replaceChildren();
  const W = 560, H = 300, left = 46, bottom = 34, top = 10, right = 12;
  const all = pairs.flatMap((p) => [p[0], p[1]]), pad = (Math.max(...all) - Math.min(...all)) * 0.06 || 0.5;
  const low = Math.max(0, Math.min(...all) - pad), high = Math.max(...all) + pad;
  const x = (v) => left + (v - low) / (high - low) * (W - left - right);
  const y = (v) => H - bottom - (v - low) / (high - low) * (H - bottom - top);
  const names = [...new Set(pairs.map((p) => p[2]))].sort(), nodes = [];
  for (const t of ticks(low, high)) {
    nodes.push(svg("line", { class: "axis", x1: x(t), x2: x(t), y1: top, y2: H - bottom }), svg("line", { class: "axis", x1: left, x2: W - right, y1: y(t), y2: y(t) }));
    nodes.push(svg("text", { x: x(t), y: H - bottom + 16, "text-anchor": "middle" }, String(t)), svg("text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, String(t)));
  }
  nodes.push(svg("line", { class: "ideal", x1: x(low), y1: y(low), x2: x(high), y2: y(high) }));
  nodes.push(svg("text", { x: (W + left) / 2, y: H - 3, "text-anchor": "middle" }, "predicted distinct experts per step and layer"));
  nodes.push(svg("text", { x: 12, y: (H - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(H - bottom) / 2})` }, "realised"));
  for (const [p, r, name] of pairs) {
    nodes.push(svg("circle", { cx: x(p), cy: y(r), r: 4, fill: color(names.indexOf(name)), "fill-opacity": 0.65 }, svg("title", {}, `${short(name)}: predicted ${number(p)}, realised ${number(r)}`)));
  }
  const label = `${pairs.length} intervals; on the dashed line predicted equals realised`;
  $("scatter").replaceChildren(svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label }, ...nodes),
    el("ul", { class: "keys" }, ...names.slice(0, 8).map((n, i) => key(i, short(n)))));
}
function key(i, text) {
  return el("li", {}, svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { width: 10, height: 10, rx: 2, fill: color(i) })), text);
}

function branches(b) {
  say("branch-why", b.names.length ? "" : "no decision yet");
  if (!b.names.length) { $("branch-legend").replaceChildren(); return $("branches").replaceChildren(); }
  const W = 560, H = 250, left = 46, bottom = 22, top = 10, nodes = [];
  const high = Math.max(...b.counts.map((row) => row.reduce((s, v) => s + v, 0)), 1), step = (W - left - 8) / b.counts.length;
  const y = (v) => H - bottom - v / high * (H - bottom - top);
  for (const t of ticks(0, high).filter(Number.isInteger)) {
    nodes.push(svg("line", { class: "axis", x1: left, x2: W - 8, y1: y(t), y2: y(t) }), svg("text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, String(t)));
  }
  b.counts.forEach((row, i) => {
    let sum = 0;
    row.forEach((count, k) => {
      if (!count) return;
      nodes.push(svg("rect", { x: left + i * step, width: Math.max(step - 1, 0.5), y: y(sum + count), height: y(sum) - y(sum + count), fill: color(k) },
        svg("title", {}, `${clock(b.start + i * b.width)}: ${count} × ${b.names[k]}`)));
      sum += count;
    });
  });
  const end = b.start + b.width * b.counts.length;
  nodes.push(svg("text", { x: left, y: H - 4 }, clock(b.start)), svg("text", { x: W - 8, y: H - 4, "text-anchor": "end" }, clock(end)));
  const label = "Decisions by branch over time: " + b.names.map((n, i) => `${n} ${b.totals[i]}`).join(", ");
  $("branches").replaceChildren(svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label }, ...nodes));
  $("branch-legend").replaceChildren(...b.names.map((n, i) => key(i, `${n} ${b.totals[i].toLocaleString("en")}`)));
}

const identity = (d) => `${d.time}|${d.request_id}`;
function decisions(rows, total) {
  say("decisions-why", rows.length ? "" : "no decision yet");
  $("decisions-note").textContent = rows.length ? `newest ${rows.length} of ${total.toLocaleString("en")}; open one to see why` : "";
  const body = $("decisions").tBodies[0], active = document.activeElement;
  const kept = active && body.contains(active) ? active.dataset.key : null, nodes = [];
  rows.forEach((d, i) => {
    const id = identity(d), open = id === state.open;
    const button = el("button", { type: "button", "aria-expanded": String(open), "aria-controls": `why-${i}`, "data-key": id, title: d.request_id }, d.request_id);
    button.addEventListener("click", () => { state.open = open ? null : id; decisions(rows, total); });
    nodes.push(el("tr", {}, el("td", {}, clock(d.time)), el("td", { class: "id" }, button), el("td", { title: d.worker }, short(d.worker)),
      el("td", {}, d.reason ? `${d.branch}: ${d.reason}` : d.branch), el("td", { class: "num" }, number(d.added_experts)),
      el("td", { class: "num" }, number(d.prompt_tokens)), el("td", { class: "num" }, micro(d.decision_us))));
    if (open) nodes.push(el("tr", { class: "detail", id: `why-${i}` }, el("td", { colspan: 7 }, ...detail(d))));
  });
  body.replaceChildren(...nodes);
  if (kept) [...body.querySelectorAll("button")].find((b) => b.dataset.key === kept)?.focus();
}
function detail(d) {
  const e = d.explanation, seconds = (s) => s === null ? null : number(s) + " s";
  const facts = [`request ${d.request_id}`, `policy ${d.policy}`, `branch ${d.branch}`, d.arm ? `arm ${d.arm}` : null, `prefilled by ${short(d.prefill_worker || "nobody")}`, `${d.prompt_tokens} prompt tokens`,
    d.coverage === null ? "no signature" : `signature covers ${fixed(100 * d.coverage, 0)} % of them`, d.outcome ? `ended ${d.outcome}` : null,
    d.ttft_s ? `first byte ${seconds(d.ttft_s)}` : null, d.tpot_s ? `${number(1000 * d.tpot_s)} ms per event` : null].filter(Boolean);
  const c = e.candidates, has = (name) => c.some((row) => row[name] !== null && row[name].length !== 0);
  const scores = c.map((row) => row.score).filter((s) => s !== null), most = Math.max(...scores, 1e-12);
  const head = ["Worker", ...(e.score === "none" ? [] : [{ cost: "Cost", similarity: "Similarity", load: "Load", kv_tokens: "KV tokens" }[e.score]]), ...(has("band") ? ["In band"] : []), ...(has("load") ? ["Running then"] : []), ...(has("shadows") ? ["Shadows that agree"] : []), ""];
  const rows = c.map((row) => {
    const cells = [el("td", { title: row.worker }, short(row.worker))];
    if (e.score !== "none") {
      const meter = row.score === null ? null : svg("svg", { class: "meter", viewBox: "0 0 90 8", "aria-hidden": "true" }, svg("rect", { width: Math.max(1, 90 * row.score / most), height: 8, rx: 2, fill: row.chosen ? "var(--accent)" : "var(--soft)" }));
      cells.push(el("td", {}, meter, row.score === null ? row.why_not : e.score === "cost" ? "× " + row.score.toFixed(3) : number(row.score, 4)));
    }
    if (has("band")) cells.push(el("td", {}, row.band ? "yes" : "no"));
    if (has("load")) cells.push(el("td", {}, number(row.load)));
    if (has("shadows")) cells.push(el("td", {}, row.shadows.join(", ")));
    cells.push(el("td", {}, row.chosen ? "✓ chosen" : ""));
    return el("tr", { class: row.chosen ? "chosen" : null }, ...cells);
  });
  return [el("p", {}, e.sentence), el("p", { class: "facts" }, facts.join(" · ")),
    el("table", {}, el("thead", {}, el("tr", {}, ...head.map((h) => el("th", { scope: "col" }, h)))), el("tbody", {}, ...rows)),
    el("p", { class: "facts" }, (e.left_out ? `${e.left_out} more candidates; eldr explain shows all. ` : "") + (e.score === "none" ? "" : `Score: ${e.meaning}.`))].filter(Boolean);
}

// A file names each worker once.
function expand(data) {
  for (const pair of data.pairs) pair[2] = data.names[pair[2]];
  for (const d of data.decisions) for (const c of d.explanation.candidates) {
    Object.assign(c, { score: null, why_not: null, load: null, shadows: [], chosen: false, ...c, worker: data.names[c.worker] });
  }
}
function show(data) {
  state.data = data;
  $("main").hidden = false;
  const s = data.source, day = new Date(s.time * 1000).toLocaleString("en-GB");
  $("source").textContent = `${s.name} · policy ${data.policy.join(", ") || "none"} · ${data.decisions_total.toLocaleString("en")} decisions` + (s.kind === "live" ? "" : ` · ${s.kind === "log" ? "until" : "taken"} ${day}`);
  const one = data.layers && data.layers[state.layer];
  const map = one ? { ...data.heat, ...one, layer: Number(state.layer) } : data.heat;
  numbers(data.numbers, map.why ? 0 : map.experts);
  heat(map);
  scatter(data.pairs, data.numbers.error.why);
  branches(data.branches);
  decisions(data.decisions, data.decisions_total);
}
function status(kind, text) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = kind;
}

// Server-sent events over fetch: EventSource cannot send the admin key.
async function follow() {
  state.stop?.abort();
  const stop = state.stop = new AbortController();
  let wait = 1000;
  while (!stop.signal.aborted) {
    try {
      const headers = state.key ? { Authorization: "Bearer " + state.key } : {};
      const answer = await fetch(`events?layer=${encodeURIComponent(state.layer)}`, { headers, signal: stop.signal, cache: "no-store" });
      if (answer.status === 401) return login(Boolean(state.key));
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      $("login").hidden = true;
      $("pause").hidden = false;
      wait = 1000;
      await events(answer.body.getReader());
      throw new Error("the router closed the connection");
    } catch (error) {
      if (stop.signal.aborted) return;
      status("lost", `no connection (${error.message}); trying again`);
      await new Promise((next) => setTimeout(next, wait));
      wait = Math.min(wait * 2, 15000);
    }
  }
}
async function events(reader) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + decoder.decode(value, { stream: true })).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ") || state.paused) continue;
      show(JSON.parse(part.slice(6)));
      status("live", "live");
    }
  }
}
function login(wrong) {
  status("lost", wrong ? "this key is not accepted" : "this router asks for its admin key");
  $("source").textContent = location.host;
  $("login").hidden = false;
  $("key").focus();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value;
  follow();
});
$("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  $("pause").setAttribute("aria-pressed", String(state.paused));
  $("pause").textContent = state.paused ? "Resume" : "Pause";
  status(state.paused ? "" : "live", state.paused ? "paused" : "live");
});
$("layer").addEventListener("change", () => {
  state.layer = $("layer").value;
  if (state.data.source.kind === "live") follow(); else show(state.data);
});
for (const id of ["sorted", "contrast"]) $(id).addEventListener("change", () => show(state.data));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.data && show(state.data));

const embedded = JSON.parse($("data").textContent);
if (embedded) {
  expand(embedded);
  show(embedded);
  const wanted = new URLSearchParams(location.hash.slice(1)).get("request");
  const found = embedded.decisions.find((d) => d.request_id === wanted);
  if (found) { state.open = identity(found); show(embedded); }
} else {
  follow();
}
})();
