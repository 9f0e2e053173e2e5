// Heat maps on a canvas: cells in pixels of a small picture, which is enlarged without smoothing.
"use strict";

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rgb = hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
const LEFT = 46, BOTTOM = 34, TOP = 6, RIGHT = 8;

// Draw cells (a function from an index to [r, g, b]) with axes; returns the place of the cells on the canvas.
function drawHeat(canvas, { width, height, cell, x, y, tall }) {
  const ratio = window.devicePixelRatio || 1, wide = canvas.clientWidth || canvas.parentElement.clientWidth;
  canvas.width = Math.round(wide * ratio);
  canvas.height = Math.round(tall * ratio);
  canvas.style.height = `${tall}px`;
  const small = new OffscreenCanvas(width, height), brush = small.getContext("2d");
  const image = brush.createImageData(width, height);
  for (let at = 0; at < width * height; at++) {
    const shown = cell(at);
    for (let part = 0; part < 3; part++) image.data[4 * at + part] = shown[part];
    image.data[4 * at + 3] = 255;
  }
  brush.putImageData(image, 0, 0);
  const place = { left: LEFT, top: TOP, width: wide - LEFT - RIGHT, height: tall - TOP - BOTTOM };
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, place.left, place.top, place.width, place.height);
  pen.fillStyle = colour("--soft");
  pen.font = "12px system-ui, sans-serif";
  drawTicks(pen, place, x, y);
  return place;
}

function drawTicks(pen, place, x, y) {
  pen.textAlign = "center";
  pen.textBaseline = "top";
  for (const value of ticks(x.from, x.to, Math.max(2, place.width / 90))) {
    pen.fillText(x.names?.[value] ?? value, place.left + place.width * (value - x.from + 0.5) / (x.to - x.from + 1), place.top + place.height + 4);
  }
  pen.fillText(x.title, place.left + place.width / 2, place.top + place.height + 19);
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const value of ticks(y.from, y.to, Math.max(2, place.height / 26))) {
    const text = y.names?.[value] ?? String(value);
    pen.fillText(text.length > 6 ? `${text.slice(0, 5)}…` : text, place.left - 5, place.top + place.height * (value - y.from + 0.5) / (y.to - y.from + 1));
  }
  pen.save();
  pen.translate(6, place.top + place.height / 2);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "center";
  pen.fillText(y.title, 0, 0);
  pen.restore();
}

// Whole numbers at even distances, about so many.
function ticks(from, to, most) {
  const rough = (to - from) / most, power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const step = Math.max(1, [1, 2, 5, 10].map(k => k * power).find(k => k >= rough) ?? 1), found = [];
  for (let value = Math.ceil(from / step) * step; value <= to; value += step) found.push(value);
  return found;
}

const mix = (a, b, share) => a.map((value, i) => value + (b[i] - value) * share);

// Clients by rounds: the share of used turns from grey to blue; where answers are missing or refused, their colours.
function turnsCell(cells, size) {
  const [absent, used, missing, refused] = ["--absent", "--used", "--missing", "--refused"].map(name => rgb(colour(name)));
  return at => {
    const [u, m, r] = [cells[at], cells[size + at], cells[2 * size + at]].map(value => value / 255);
    let shown = mix(absent, used, Math.sqrt(u));
    if (m) shown = mix(shown, missing, Math.max(0.55, m));
    return r ? mix(shown, refused, Math.max(0.6, r)) : shown;
  };
}
