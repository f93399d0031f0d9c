// The curves of a run, by uPlot: told apart by dashes and dots as well as by colour.

const HEIGHT = 230;
const charts = {};

export function drawCharts(history, axis) {
  const steps = Object.keys(history).map(Number).sort((a, b) => a - b);
  const points = steps.map((step) => history[step]);
  const x = axis === "step" ? steps : points.map((point) => point[0]);
  const column = (at) => points.map((point) => point[at]);
  draw("loss-chart", axis, [x, column(1), column(2)], ["loss", "validation loss"]);
  draw("speed-chart", axis, [x, column(3)], ["tokens/s"]);
}

function draw(id, axis, data, names) {
  const place = document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const width = Math.floor(place.clientWidth);
  const look = `${axis} ${dark} ${width}`;
  if (!width) return;
  if (charts[id]?.look !== look) {
    charts[id]?.plot.destroy();
    charts[id] = { look, plot: new uPlot(options(axis, width, names), data, place) };
  } else if (charts[id].last !== JSON.stringify(data)) charts[id].plot.setData(data);
  charts[id].last = JSON.stringify(data);
  showNewest(charts[id].plot, data);
}

// The legend has the newest values while nobody points at others.
function showNewest(plot, data) {
  if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) return;
  plot.setLegend({ idxs: data.map((values) => values.findLastIndex((value) => value !== null)) });
}

function options(axis, width, names) {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axisStyle = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  const [first, second] = names;
  const fromZero = (plot, least, most) => [0, (most || 1) * 1.1];
  const series = [
    { label: axis === "step" ? "step" : "hours" },
    { label: first, stroke: colour("--accent"), width: 1.5, points: { show: false } },
  ];
  if (second) {
    const stroke = colour("--warn");
    series.push({ label: second, stroke, width: 2, dash: [6, 4], spanGaps: true, points: { show: true, size: 6, fill: stroke } });
  }
  return {
    width, height: HEIGHT, series,
    scales: { x: { time: false }, y: second ? {} : { range: fromZero } },
    axes: [axisStyle, { ...axisStyle, size: 60 }],
    cursor: { drag: { x: true, y: false } },
    legend: { live: true },
  };
}
