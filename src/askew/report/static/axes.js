// The axes of curves: where their marks are, and how these are written.
"use strict";

const FONT = "12px system-ui, sans-serif", DIGIT = 7, NARROWEST = 52; // pixels of a digit, and of the axis to the left
const LOG_FROM = 1e4; // the highest value over the lowest, above which an axis is logarithmic
const MOST_MARKS = 7; // of a logarithmic axis
const powers = (from, to, parts) => Array.from({ length: to - from + 1 }, (_, at) => parts.map(part => Number(`${part}e${from + at}`))).flat();
const WHOLE = powers(0, 9, [1, 2, 5]); // steps between rounds
const HUGE = powers(1, 307, [1, 2, 2.5, 5]); // steps beyond those that uPlot knows

// Large and small numbers have exponents: 0.25, 250, 2.5e6.
const isExtreme = size => size >= 1e4 || (size > 0 && size < 1e-3);
const exponent = (value, digits) => Number(value.toExponential(digits)).toExponential().replace("e+", "e");
const numberText = value => isExtreme(Math.abs(value)) ? exponent(value, 2) : Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(3);

// The marks of an axis with equal steps: as many digits as distinguish them.
function markTexts(_, marks, axis, space, step) {
  const most = Math.max(...marks.map(Math.abs)), size = value => Math.floor(Math.log10(value));
  if (!isExtreme(most)) return marks.map(mark => String(Number(mark.toFixed(Math.max(0, 1 - size(step))))));
  return marks.map(mark => mark === 0 ? "0" : exponent(mark, Math.max(0, Math.min(15, size(most) - size(step) + 1))));
}

const logTexts = (_, marks) => marks.map(mark => isExtreme(mark) ? exponent(mark, 0) : String(mark));

// The marks of a logarithmic axis: powers of ten, of few of them also 2 and 5.
function logMarks(_, axis, low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), every = Math.ceil((to - from + 1) / MOST_MARKS);
  const marks = to - from < 3 ? powers(from, to, [1, 2, 5]) : powers(from, to, [1]).filter((_, at) => at % every === 0);
  return marks.filter(mark => mark >= low && mark <= high);
}

// Whether the values of curves need a logarithmic axis.
function needsLog(columns) {
  const values = columns.flat().filter(value => value != null), low = values.reduce((a, b) => Math.min(a, b), Infinity);
  return low > 0 && values.reduce((a, b) => Math.max(a, b), 0) > LOG_FROM * low;
}

const isHuge = columns => columns.flat().some(value => Math.abs(value) > 1e15);

// `over` is what the curves are drawn over, `texts` writes its marks if uPlot shall not; the other axis may be logarithmic
// (`log`) or have values beyond the steps that uPlot knows (`huge`).
function axes(title, { over = "", texts = null, log = false, huge = false } = {}) {
  const line = { stroke: colour("--line"), width: 1 }, common = { stroke: colour("--soft"), grid: line, ticks: line, font: FONT, labelFont: FONT };
  const x = { ...common, label: title, labelSize: 20, size: 30, space: 70, ...(over === "round" ? { incrs: WHOLE } : {}), ...(texts ? { values: texts } : {}) };
  const size = (_, marks) => Math.max(NARROWEST, 18 + DIGIT * Math.max(0, ...(marks ?? []).map(mark => mark.length)));
  const y = { ...common, size, values: markTexts, ...(huge ? { incrs: HUGE } : {}) };
  return [x, log ? { ...y, values: logTexts, splits: logMarks, filter: (_, marks) => marks } : y];
}
