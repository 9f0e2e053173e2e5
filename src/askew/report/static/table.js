// The table of runs: sorted, filtered, and only as many rows in the page as are seen.
"use strict";

const ROW = 30, SPARE = 8, BROKEN = 5; // pixels of a row; rows above and below what is seen; broken folders in words
const percent = value => value == null ? "" : (100 * value).toFixed(1);
const bytes = value => {
  if (value == null) return "";
  const power = value < 1 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${power ? (value / 1000 ** power).toFixed(1) : Math.round(value)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
};
const duration = value => value == null ? "" : value < 1 ? `${Math.round(1000 * value)} ms` : value < 100 ? `${value.toFixed(1)} s` : value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
// key, title, text of a row, width (the setting takes what is left), is it a number, is it left out on a small screen
const COLUMNS = [
  ["name", "Run", row => row.name, "16%"],
  ["state", "State", row => row.state, "96px"],
  ["method", "Method", row => row.method ?? "", "86px", false, true],
  ["data", "Data", row => row.data ?? "", "74px", false, true],
  ["setting", "Setting", row => row.setting ?? "", "", false, true],
  ["seed", "Seed", row => row.seed ?? "", "50px", true],
  ["round", "Round", row => row.rounds == null ? "" : `${row.round}/${row.rounds}`, "86px", true],
  ["accuracy", "Acc. %", row => percent(row.accuracy), "64px", true],
  ["best", "Best %", row => percent(row.best), "64px", true, true],
  ["loss", "Loss", row => row.loss == null ? "" : numberText(row.loss), "68px", true, true],
  ["bytes", "Sent", row => bytes(row.bytes), "78px", true, true],
  ["seconds", "Time", row => duration(row.seconds), "72px", true, true],
  ["begun", "Begun", row => row.begun ? new Date(1000 * row.begun).toLocaleString([], { dateStyle: "short", timeStyle: "short", hourCycle: "h23" }) : "", "132px", true, true],
];

class RunTable {
  constructor(choose, isChosen) {
    Object.assign(this, { choose, isChosen, rows: new Map(), shown: [], key: "begun", down: true, words: [], lines: new WeakMap(), above: space(), below: space() });
    this.scroll = document.getElementById("scroll");
    this.body = document.querySelector("#runs tbody");
    this.head = document.querySelector("#runs thead tr");
    this.head.append(Object.assign(document.createElement("th"), { scope: "col", ariaLabel: "Chosen" }));
    for (const [key, title, , width, number, minor] of COLUMNS) {
      const th = document.createElement("th"), button = document.createElement("button");
      th.scope = "col";
      th.className = `${number ? "number" : ""} ${minor ? "minor" : ""}`;
      th.dataset.key = key;
      th.style.width = width;
      button.type = "button";
      button.textContent = title;
      button.addEventListener("click", () => this.sortBy(key, number));
      th.append(button);
      this.head.append(th);
    }
    this.scroll.addEventListener("scroll", () => this.paint(), { passive: true });
    document.getElementById("filter").addEventListener("input", event => {
      this.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      this.scroll.scrollTop = 0;
      this.arrange();
    });
  }

  sortBy(key, number) {
    this.down = this.key === key ? !this.down : Boolean(number);
    this.key = key;
    this.arrange();
  }

  update(rows) {
    for (const row of rows) {
      if (row.state === "gone") this.rows.delete(row.id);
      else this.rows.set(row.id, { ...row, text: [row.name, row.method, row.data, row.setting, row.state, row.seed != null ? `seed${row.seed}` : ""].join(" ").toLowerCase() });
    }
    this.arrange();
  }

  arrange() {
    const { key, down, words } = this;
    this.shown = [...this.rows.values()].filter(row => words.every(word => row.text.includes(word)));
    this.shown.sort((a, b) => compare(a[key], b[key], down) || a.id - b.id);
    for (const th of this.head.children) th.dataset.key === key ? th.setAttribute("aria-sort", down ? "descending" : "ascending") : th.removeAttribute("aria-sort");
    this.listBroken();
    const all = this.rows.size, count = this.shown.length === all ? `${all} run${all === 1 ? "" : "s"}` : `${this.shown.length} of ${all} runs`;
    document.getElementById("count").textContent = all ? count : "No runs yet: they appear here as they begin.";
    this.paint();
  }

  listBroken() {
    const broken = this.shown.filter(row => row.state === "broken"), list = document.getElementById("broken");
    const lines = broken.slice(0, BROKEN).map(row => `${row.name}: ${row.problem}`);
    if (broken.length > BROKEN) lines.push(`and ${broken.length - BROKEN} more broken folders`);
    list.replaceChildren(...lines.map(textContent => Object.assign(document.createElement("li"), { textContent })));
  }

  paint() {
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - SPARE);
    const last = Math.min(this.shown.length, first + Math.ceil((this.scroll.clientHeight || 330) / ROW) + 2 * SPARE);
    const wanted = [this.above, ...this.shown.slice(first, last).map(row => this.line(row)), this.below], stay = new Set(wanted);
    this.above.firstChild.style.height = `${first * ROW}px`;
    this.below.firstChild.style.height = `${(this.shown.length - last) * ROW}px`;
    for (const tr of [...this.body.children]) if (!stay.has(tr)) tr.remove();
    wanted.forEach((tr, at) => this.body.children[at] === tr || this.body.insertBefore(tr, this.body.children[at] ?? null)); // few are new
  }

  line(row) {
    if (!this.lines.has(row)) this.lines.set(row, this.makeLine(row));
    const tr = this.lines.get(row);
    tr.querySelector("input").checked = this.isChosen(row.id);
    return tr;
  }

  makeLine(row) {
    const tr = document.createElement("tr"), box = document.createElement("input"), first = document.createElement("td");
    tr.dataset.id = row.id;
    box.type = "checkbox";
    box.disabled = row.state === "broken" || row.state === "being read";
    box.ariaLabel = `Choose ${row.name}`;
    first.append(box);
    tr.append(first);
    tr.addEventListener("click", () => box.disabled || this.choose(row.id));
    if (row.state === "broken") tr.title = row.problem;
    for (const [key, , text, , number, minor] of COLUMNS) {
      const td = document.createElement("td");
      td.className = `${number ? "number" : ""} ${minor ? "minor" : ""} ${key === "state" ? `state-${row.state.replace(" ", "-")}` : ""}`;
      td.textContent = text(row);
      if (!number) td.title = td.textContent;
      tr.append(td);
    }
    return tr;
  }
}

function space() {
  const tr = document.createElement("tr"), td = document.createElement("td");
  tr.className = "space";
  tr.ariaHidden = "true";
  tr.append(td);
  return tr;
}

// What is not known comes last, whichever way.
function compare(a, b, down) {
  if (a == null || b == null) return (a == null) - (b == null);
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return down ? -order : order;
}

// The table of methods in a report: what is not known comes last, numbers are first sorted from the highest.
for (const button of document.querySelectorAll(".methods th button")) button.addEventListener("click", () => {
  const head = button.parentNode, column = head.cellIndex, body = head.closest("table").tBodies[0], number = column > 0;
  const value = row => row.cells[column].dataset.v === "" ? null : number ? Number(row.cells[column].dataset.v) : row.cells[column].dataset.v;
  const down = head.getAttribute("aria-sort") === (number ? "descending" : "ascending") ? !number : number;
  const rows = [...body.rows].sort((a, b) => compare(value(a), value(b), down));
  for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
});
