// Where the page's data come from: the server of askew watch, or, in a report, the page itself.
"use strict";

const bytesOf = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));

// Cells of a heat map with their grid: which rounds and clients all cells are, and which of the cells are shown.
const inGrid = turns => ({ ...turns, cells: bytesOf(turns.cells), grid: { column: 0, row: 0, columns: turns.width, rows: turns.height, window: turns.window } });

class WatchServer {
  async ask(name, query = {}) {
    const answer = await fetch(`${name}?${new URLSearchParams(query)}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  runs() { return this.ask("runs"); }
  curves(ids) { return this.ask("curves", { ids: ids.join() }); }
  clients(id) { return this.ask("clients", { id }); }

  async turns(id, [first, last, low, high]) { return inGrid(await this.ask("turns", { id, first, last, low, high })); }

  // Tell of runs that change.
  follow(version, receive, say) {
    const events = new EventSource(`events?since=${version}`);
    events.onopen = () => say("live", "on");
    events.onerror = () => say("connection lost; is askew watch still running?", "off");
    events.onmessage = event => {
      receive(JSON.parse(event.data));
      say("live", "on");
    };
  }
}

class ReportFile {
  constructor(text) {
    this.data = JSON.parse(text);
    this.read = new Map();
  }

  // What the file holds of a run, which is compressed.
  run(id) {
    if (!this.read.has(id)) {
      const plain = new Blob([bytesOf(this.data.runs[id])]).stream().pipeThrough(new DecompressionStream("deflate"));
      this.read.set(id, new Response(plain).json());
    }
    return this.read.get(id);
  }

  async runs() { return this.data; }
  curves(ids) { return Promise.all(ids.map(async id => (await this.run(id)).curves)); }
  async clients(id) { return (await this.run(id)).clients; }

  // The file has one heat map of a run: a part of it shows some of its cells.
  async turns(id, [first, last, low, high]) {
    const all = inGrid((await this.run(id)).turns), { width, height, cells } = all;
    if (!width || !(first || last || low || high)) return all;
    const column = round => Math.floor((round - 1) * width / all.rounds), row = client => Math.floor(client * height / all.clients);
    const [left, right, top, bottom] = [column(first), column(last), row(low), row(high)], part = [];
    for (let layer = 0; layer < 3; layer++) for (let y = top; y <= bottom; y++) {
      const start = (layer * height + y) * width;
      part.push(...cells.subarray(start + left, start + right + 1));
    }
    return {
      ...all, window: [first, last, low, high], width: right - left + 1, height: bottom - top + 1, cells: Uint8Array.from(part),
      grid: { ...all.grid, column: left, row: top } };
  }

  follow() {}
}

const held = document.getElementById("data");
const source = held ? new ReportFile(held.textContent) : new WatchServer();
