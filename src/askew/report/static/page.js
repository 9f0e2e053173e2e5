// The page: what is chosen, what is asked of the source of its data, and when.
"use strict";

const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7f87", "#c8203a", "#8a4fd8", "#6aa60f", "#8a6d1c", "#5566d0"]; // the first as in figures
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3], [1, 5], [12, 5]];
const PAUSE = 700; // milliseconds between two requests for pictures
const MOST_SERIES = 60; // curves of one panel
const ENLARGE = "Drag over a part to enlarge it, or use the keys +, − and arrows.";
const $ = id => document.getElementById(id);
const make = (tag, fields = {}, ...inner) => {
  const node = Object.assign(document.createElement(tag), fields);
  node.append(...inner);
  return node;
};
const page = { chosen: new Map(), most: 12, charts: new Map(), zoom: [0, 0, 0, 0], shown: null, wanted: false, busy: false, picked: false };
const table = new RunTable(choose, id => page.chosen.has(id));
const countText = (number, word, plural = `${word}s`) => `${number} ${number === 1 ? word : plural}`;
const dot = (fill, square) => {
  const mark = make("span", { className: square ? "dot square" : "dot" });
  mark.style.background = fill;
  return mark;
};

// choice -------------------------------------------------------------------------------------------------------------

function choose(id) {
  page.picked = true;
  if (page.chosen.has(id)) page.chosen.delete(id);
  else if (page.chosen.size < page.most) {
    const taken = new Set(page.chosen.values());
    page.chosen.set(id, COLOURS.find(each => !taken.has(each)) ?? COLOURS[0]);
  } else return say(`At most ${page.most} runs are shown at once.`);
  changeChoice();
}

// Until somebody chooses, the two runs that began last are shown, or those that the data name.
function chooseFirst() {
  if (page.picked) return;
  const last = [...table.rows.values()].filter(row => row.begun).sort((a, b) => b.begun - a.begun).slice(0, 2).map(row => row.id);
  const ids = page.first ?? last;
  if (ids.every(id => page.chosen.has(id)) && page.chosen.size === ids.length) return;
  page.chosen = new Map(ids.map((id, at) => [id, COLOURS[at]]));
  changeChoice();
}

function changeChoice() {
  const ids = [...page.chosen.keys()];
  if (!page.chosen.has(page.shown)) {
    page.shown = ids[0] ?? null;
    page.zoom = [0, 0, 0, 0];
  }
  $("chips").replaceChildren(...ids.map(id => {
    const remove = make("button", { type: "button", textContent: "×", ariaLabel: `Remove ${nameOf(id)}` });
    remove.addEventListener("click", () => choose(id));
    return make("li", { title: nameOf(id) }, dot(page.chosen.get(id)), make("span", { textContent: shortName(id) }), remove);
  }));
  $("which").replaceChildren(...ids.map(id => make("option", { value: id, textContent: shortName(id), selected: id === page.shown })));
  $("chosen").hidden = $("one").hidden = !ids.length;
  table.paint();
  refresh();
}

// The name of a chosen run: without the hash at its end, or by its settings where a report knows them, if that is enough.
function shortName(id) {
  const others = [...page.chosen.keys()].filter(other => other !== id);
  return [bareName, labelOf, seedOf, nameOf].find(name => !others.some(other => name(other) === name(id)))?.(id) ?? nameOf(id);
}

const nameOf = id => table.rows.get(id)?.name ?? `run ${id}`;
const bareName = id => nameOf(id).replace(/^.*\//, "").replace(/-[0-9a-f]{8}$/, "");
const labelOf = id => table.rows.get(id)?.label || nameOf(id);
const seedOf = id => `${labelOf(id)}, seed ${table.rows.get(id)?.seed}`;

// pictures -----------------------------------------------------------------------------------------------------------

// Ask for the pictures again: at once, but never twice at a time.
async function refresh() {
  page.wanted = true;
  if (page.busy) return;
  page.busy = true;
  while (page.wanted) {
    page.wanted = false;
    if (page.chosen.size) await Promise.all([showCurves(), showOne()].map(part => part.catch(error => say(error.message))));
    await new Promise(done => setTimeout(done, PAUSE));
  }
  page.busy = false;
}

async function showCurves() {
  const ids = [...page.chosen.keys()], over = $("over").value, runs = await source.curves(ids);
  if (ids.join() !== [...page.chosen.keys()].join()) return;
  const panels = panelsOf(ids, runs, over), names = new Set(panels.map(panel => panel.name));
  for (const [name, chart] of page.charts) if (name !== "shares" && !names.has(name)) removeChart(name, chart);
  panels.forEach((panel, at) => addBox({ ...panel, at })); // all of them before the first is drawn: they share the width
  for (const panel of panels) showPanel(panel, over);
  if (!panels.length) say(over === "clock" ? "None of the chosen runs has virtual time ([time] in its configuration)." : "The chosen runs have no records yet.");
  showDifferences(ids, runs);
  showByClass(ids, runs);
}

// The curves of runs, panel by panel; only panels with something in them.
function panelsOf(ids, runs, over) {
  return Object.entries(page.titles).map(([name, title]) => {
    const series = runs.flatMap((run, at) => !run[over].length ? [] : run.series.filter(each => each.panel === name).map(({ what, at: places, y }) => ({ run: ids[at], what, y, x: places ? places.map(place => run[over][place]) : run[over] })));
    const left = Math.max(0, series.length - MOST_SERIES) + runs.reduce((sum, run) => sum + (run.left_out[name] ?? 0), 0);
    return { name, title, series: series.slice(0, MOST_SERIES), left, whats: [...new Set(series.map(each => each.what))] };
  }).filter(panel => panel.series.length);
}

function removeChart(name, chart) {
  chart.plot?.destroy();
  widths.unobserve(chart.box);
  chart.box.remove();
  page.charts.delete(name);
}

// Boxes keep the order of the panels.
function addBox(panel) {
  let chart = page.charts.get(panel.name);
  if (!chart) {
    chart = { box: make("figure", {}, make("figcaption", { textContent: panel.title })) };
    chart.box.dataset.panel = panel.name;
    page.charts.set(panel.name, chart);
    widths.observe(chart.box);
  }
  const after = $("panels").children[panel.at];
  if (after !== chart.box) $("panels").insertBefore(chart.box, after ?? null);
}

function showPanel(panel, over) {
  const several = panel.whats.length > 1;
  const series = panel.series.map(({ run, what }) => ({
    label: several ? `${shortName(run)}: ${what}` : shortName(run),
    stroke: page.chosen.get(run) ?? COLOURS[0], width: 1.6, spanGaps: true, points: { show: false },
    dash: several ? DASHES[panel.whats.indexOf(what) % DASHES.length] : [],
    value: (_, value) => value == null ? "–" : value.toPrecision(4),
  }));
  const data = uPlot.join(panel.series.map(({ x, y }) => [x, y]));
  const look = { log: needsLog(data.slice(1)), huge: isHuge(data.slice(1)) };
  const shape = JSON.stringify([over, look, series.map(({ label, stroke }) => [label, stroke])]);
  const chart = page.charts.get(panel.name);
  const title = { round: "Round", bytes: "Sent so far", seconds: "Seconds so far", clock: "Virtual seconds" }[over];
  const text = `${panel.title} by ${title.toLowerCase()}. ${panel.series.map(({ y }, at) => `${series[at].label}: ${curveText(y)}`).join(" ")}`;
  if (chart.shape === shape) {
    chart.plot.setData(data);
    return describe(chart.plot, text);
  }
  chart.plot?.destroy();
  const dense = data[0].length < 3;
  for (const each of series) each.points.show = dense;
  const texts = over === "bytes" ? (_, all) => all.map(value => value == null ? "" : bytes(value)) : null;
  const at = { label: title, value: (_, value) => value == null ? "–" : over === "bytes" ? bytes(value) : over === "seconds" || over === "clock" ? value.toFixed(2) : value };
  const scales = { x: { time: false }, ...(look.log ? { y: { distr: 3, log: 10 } } : {}) };
  const options = { ...plotSize(chart.box), scales, series: [at, ...series], axes: axes(title, { over, texts, ...look }), cursor: { sync: { key: `by ${over}` } } };
  chart.plot = new uPlot(options, data, chart.box);
  chart.shape = shape;
  describe(chart.plot, text);
  const note = panel.left ? `${panel.left} more curves are not shown; choose fewer runs.` : "";
  chart.box.querySelector(".note")?.remove();
  if (note) chart.box.append(make("p", { className: "note", textContent: note }));
}

// What a screen reader says of a chart.
function describe(plot, text) {
  const canvas = plot.root.querySelector("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", text);
}

function curveText(values) {
  const known = values.filter(value => value != null);
  if (!known.length) return "no values.";
  const [low, high] = [Math.min, Math.max].map(end => known.reduce((a, b) => end(a, b)));
  return `from ${numberText(known[0])} to ${numberText(known.at(-1))}, lowest ${numberText(low)}, highest ${numberText(high)}.`;
}

// Charts are as wide as their boxes, whatever changes these.
const widths = new ResizeObserver(() => {
  for (const [name, { box, plot }] of page.charts) {
    const size = plotSize(name === "shares" ? box.parentElement : box);
    if (plot && plot.width !== size.width) plot.setSize(size);
  }
});
widths.observe($("shares").parentElement);
const plotSize = box => ({ width: Math.max(200, Math.floor(box.clientWidth - 26)), height: 230 });

// A table with a column for each chosen run; rows are a name and the runs' values.
function compared(caption, first, ids, rows) {
  const head = make("tr", {}, make("th", { scope: "col", textContent: first }), ...ids.map(id => make("th", { scope: "col" }, dot(page.chosen.get(id)), ` ${shortName(id)}`)));
  const lines = rows.map(([name, values]) => make("tr", {}, make("th", { scope: "row", textContent: name }), ...values.map(value => make("td", { textContent: value }))));
  return make("table", {}, make("caption", { textContent: caption }), make("thead", {}, head), make("tbody", {}, ...lines));
}

const keysOf = tables => [...new Set(tables.flatMap(each => Object.keys(each)))];

function showDifferences(ids, runs) {
  if (ids.length < 2) return $("differences").replaceChildren();
  const settings = runs.map(run => run.settings);
  const rows = keysOf(settings).map(key => [key, settings.map(each => each[key] ?? "–")]).filter(([, values]) => new Set(values).size > 1);
  const equal = make("p", { className: "note", textContent: "The chosen runs have equal settings." });
  $("differences").replaceChildren(rows.length ? compared("Settings in which the chosen runs differ", "Setting", ids, rows) : equal);
}

function showByClass(ids, runs) {
  const tables = runs.map(run => run.by_class), some = ids.filter((_, at) => Object.keys(tables[at]).length);
  const rows = keysOf(tables).map(name => [name, some.map(id => percent(tables[ids.indexOf(id)][name]))]);
  $("by-class").replaceChildren(...(rows.length ? [compared("Last test accuracy by class, %", "Class", some, rows)] : []));
}

// one run ------------------------------------------------------------------------------------------------------------

async function showOne() {
  const id = page.shown;
  if (id == null) return;
  const [turns, clients] = await Promise.all([source.turns(id, page.zoom), source.clients(id)]);
  if (id !== page.shown) return;
  Object.assign(page, { turns, clients });
  drawHeats();
  showShares(clients.shares);
  showDetails(clients);
}

function drawHeats() {
  if (!page.clients) return;
  showTurns();
  showClasses(page.clients.classes);
  showAccuracies(page.clients.by_class);
}

function showTurns() {
  const { turns } = page;
  $("turns").parentElement.hidden = !turns.cells.length;
  if (!turns.cells.length) return;
  const { cells, width, height, window: [first, last, low, high] } = turns;
  page.place = drawHeat($("turns"), {
    width, height, cell: turnsCell(cells, width * height), tall: 280,
    x: { from: first, to: last, title: "Round" }, y: { from: low, to: high, title: "Client" } });
  $("turns-key").replaceChildren(...[["--used", "present"], ["--absent", "absent"], ["--missing", "late or no answer"], ["--refused", "refused or not usable"]]
    .map(([name, text]) => make("span", {}, dot(colour(name), true), text)));
  const all = last - first + 1 === turns.rounds && high - low + 1 === turns.clients;
  $("turns-all").hidden = all;
  page.turnsText = `${countText(turns.clients, "client")}, ${countText(turns.rounds, "round")}` + (all ? "" : `; shown are rounds ${first} to ${last}, clients ${low} to ${high}`);
  $("turns").setAttribute("aria-label", `Clients by rounds: ${page.turnsText}`);
  $("turns-note").textContent = `${page.turnsText}. ${ENLARGE}`;
}

function cellAt(event) {
  const { place, turns } = page, box = $("turns").getBoundingClientRect();
  const part = (value, from, size, cells) => Math.max(0, Math.min(cells - 1, Math.floor((value - from) / size * cells)));
  const { grid } = turns, [first, last, low, high] = grid.window;
  const column = part(event.clientX - box.left, place.left, place.width, turns.width), row = part(event.clientY - box.top, place.top, place.height, turns.height);
  // the first and the last that fall into a cell, as they were divided
  const span = (at, cells, from, to) => [from + Math.ceil(at * (to - from + 1) / cells), from + Math.ceil((at + 1) * (to - from + 1) / cells) - 1];
  return { column, row, rounds: span(grid.column + column, grid.columns, first, last), clients: span(grid.row + row, grid.rows, low, high) };
}

const spanText = (word, [from, to]) => from === to ? `${word} ${from}` : `${word}s ${from} to ${to}`;

$("turns").addEventListener("pointermove", event => {
  if (!page.turns?.cells.length) return;
  const at = cellAt(event), size = page.turns.width * page.turns.height, cell = at.row * page.turns.width + at.column;
  const shares = [["present", 0], ["late or no answer", 1], ["refused", 2]].map(([word, layer]) => [word, page.turns.cells[layer * size + cell]]).filter(([, value]) => value);
  const single = at.rounds[0] === at.rounds[1] && at.clients[0] === at.clients[1];
  const text = shares.map(([word, value]) => single ? word : `${word} in ${Math.round(value / 2.55)}%`).join(", ") || "absent";
  $("turns-note").textContent = `${spanText("Round", at.rounds)}, ${spanText("client", at.clients)}: ${text}.`;
});
$("turns").addEventListener("pointerleave", () => page.turnsText && ($("turns-note").textContent = `${page.turnsText}. ${ENLARGE}`));
$("turns").addEventListener("pointerdown", event => { if (page.turns?.cells.length) page.from = cellAt(event); });
$("turns").addEventListener("pointerup", event => {
  const from = page.from, to = page.turns?.cells.length && cellAt(event);
  page.from = null;
  if (!from || !to || (from.column === to.column && from.row === to.row)) return;
  const ends = key => [Math.min(from[key][0], to[key][0]), Math.max(from[key][1], to[key][1])];
  page.zoom = [...ends("rounds"), ...ends("clients")];
  refresh();
});
// The keys + and - enlarge the middle and show more again, arrows move what is shown by a quarter.
$("turns").addEventListener("keydown", event => {
  const { turns } = page, scale = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
  const [right, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
  if (!turns?.cells.length || event.ctrlKey || event.metaKey || event.altKey || !(scale || ((right || down) && !$("turns-all").hidden))) return;
  event.preventDefault();
  const span = (from, to, least, most, way) => {
    const size = Math.min(most - least + 1, Math.ceil((to - from + 1) * (scale ?? 1)));
    const start = from + Math.floor((to - from + 1 - size) / 2) + way * Math.ceil(size / 4);
    const first = Math.max(least, Math.min(most - size + 1, start));
    return [first, first + size - 1];
  };
  const [first, last, low, high] = turns.window;
  page.zoom = [...span(first, last, 1, turns.rounds, right), ...span(low, high, 0, turns.clients - 1, down)];
  refresh();
});
$("turns-all").addEventListener("click", () => { page.zoom = [0, 0, 0, 0]; refresh(); });

function showShares({ x, y, note }) {
  const box = $("shares");
  box.parentElement.hidden = !x.length;
  $("shares-note").textContent = note;
  if (!x.length) return;
  const data = [[0, ...x], [0, ...x], [null, ...y]]; // both axes begin at 0: nearly equal shares look so
  let chart = page.charts.get("shares");
  const text = `Share of turns against share of data. ${note}`;
  if (chart) {
    chart.plot.setData(data);
    return describe(chart.plot, text);
  }
  const percents = (_, value) => value?.toFixed(3) ?? "–";
  const scales = { x: { time: false, range: (_, low, high) => [low, low ? high : 1.05 * high] }, y: { range: (_, low, high) => [0, 1.05 * high] } };
  const options = {
    ...plotSize(box.parentElement), scales, axes: axes("Share of data, %"),
    series: [
      { label: "share of data, %", value: percents },
      { label: "equal shares, %", stroke: colour("--soft"), dash: [4, 4], points: { show: false }, value: percents },
      { label: "share of turns, %", stroke: colour("--used"), paths: () => null, points: { show: true, size: 5, fill: colour("--used") }, value: percents },
    ] };
  chart = { box, plot: new uPlot(options, data, box) };
  page.charts.set("shares", chart);
  describe(chart.plot, text);
}

function showClasses(classes) {
  $("classes").parentElement.hidden = !classes.clients;
  if (!classes.clients) return;
  const most = classes.values.reduce((a, b) => Math.max(a, b), 1), none = rgb(colour("--absent")), full = rgb(colour("--used"));
  drawHeat($("classes"), {
    width: classes.width, height: classes.height, cell: at => mix(none, full, Math.sqrt(classes.values[at] / most)), tall: 260,
    x: { from: 0, to: classes.clients - 1, title: "Client" }, y: { from: 0, to: classes.classes - 1, title: "Class", names: classes.names } });
  const text = `${countText(classes.clients, "client")}, ${countText(classes.classes, "class", "classes")}; the darkest cell is ${countText(Math.round(most), "sample")}`;
  $("classes-note").textContent = `${text.replace("darkest", "strongest")}.`;
  $("classes").setAttribute("aria-label", `Samples by class and client: ${text}`);
}

function showAccuracies({ classes, names, rounds, cells }) {
  $("accuracies").parentElement.hidden = !classes;
  if (!classes) return;
  const values = bytesOf(cells), none = rgb(colour("--absent")), low = rgb(colour("--low")), high = rgb(colour("--used")), middle = rgb(colour("--middle"));
  const shade = share => share < 0.5 ? mix(low, middle, 2 * share) : mix(middle, high, 2 * share - 1);
  const everyRound = rounds.at(-1) - rounds[0] === rounds.length - 1;
  drawHeat($("accuracies"), {
    width: rounds.length, height: values.length / rounds.length, cell: at => values[at] ? shade((values[at] - 1) / 254) : none, tall: 260,
    x: everyRound ? { from: rounds[0], to: rounds.at(-1), title: "Round" } : { from: 0, to: rounds.length - 1, title: "Round", names: rounds }, y: { from: 0, to: classes - 1, title: "Class", names } });
  $("accuracies-key").replaceChildren(...[0, 0.5, 1].map(share => make("span", {}, dot(`rgb(${shade(share)})`, true), `${100 * share} %`)));
  const last = [...Array(values.length / rounds.length).keys()].map(row => [values[(row + 1) * rounds.length - 1], names[row] ?? row]).filter(([value]) => value).sort((a, b) => a[0] - b[0])[0];
  $("accuracies-note").textContent = `${classes} classes` + (last ? `; at the end the lowest accuracy is ${Math.round((last[0] - 1) / 2.54)} %, of class ${last[1]}.` : ".");
}

function showDetails({ facts, reasons, incidents }) {
  const lines = [...reasons.map(text => make("li", { className: "reason", textContent: text })), ...incidents.map(([round, text]) => make("li", { textContent: `Round ${round}: ${text}` }))];
  $("incidents").replaceChildren(lines.length ? make("ul", {}, ...lines) : make("p", { className: "note", textContent: "No answer was lost." }));
  $("facts").replaceChildren(...Object.entries(facts).flatMap(([key, value]) => [make("dt", { textContent: key }), make("dd", { textContent: value })]));
}

// life ---------------------------------------------------------------------------------------------------------------

function say(text, state = "") {
  $("link").textContent = text;
  $("link").className = state;
}

function receive({ rows }) {
  table.update(rows);
  chooseFirst();
  if (rows.some(row => page.chosen.has(row.id))) refresh();
}

async function start() {
  const all = await source.runs();
  Object.assign(page, { most: all.most, titles: all.panels, first: all.first });
  $("folder").textContent = all.folder ?? "";
  receive(all);
  source.follow(all.version, receive, say);
}

function redraw() {
  for (const [name, chart] of page.charts) {
    if (name !== "shares") removeChart(name, chart);
    else chart.plot.destroy();
  }
  page.charts.clear();
  refresh();
}

$("none").addEventListener("click", () => { page.picked = true; page.chosen.clear(); changeChoice(); });
$("over").addEventListener("change", refresh);
$("which").addEventListener("change", event => { page.shown = Number(event.target.value); page.zoom = [0, 0, 0, 0]; refresh(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let resizing;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    drawHeats();
    table.paint();
  }, 120);
});
start().catch(error => say(error.message, "off"));
