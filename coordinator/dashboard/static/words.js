// Numbers and times in words.

export function amount(value) {
  if (value === undefined) return undefined;
  if (value >= 1e12) return `${(value / 1e12).toPrecision(3)} trillion`;
  if (value >= 1e9) return `${(value / 1e9).toPrecision(3)} billion`;
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)} million`;
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 0 });
}

export function duration(seconds) {
  if (seconds === undefined) return undefined;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export function ago(seconds) {
  return duration(Math.max(10, Math.round(seconds / 10) * 10));
}

export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString("en-GB");
}

export function when(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

const STATES = {
  serving: { text: "● serving", className: "good" },
  joining: { text: "◔ joining", className: "warn" },
  paused: { text: "‖ paused", className: "" },
  draining: { text: "○ leaving", className: "warn" },
  gone: { text: "✕ gone", className: "bad" },
};

export function stateOf(state) {
  return STATES[state] ?? { text: state, className: "" };
}
