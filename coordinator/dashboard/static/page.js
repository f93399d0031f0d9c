// The page of a run: takes its state from the server's events, and shows it. All text goes through textContent.
import { drawCharts } from "/static/charts.js";
import { ago, amount, clock, duration, stateOf, when } from "/static/words.js";
import { showTable } from "/static/tables.js";
import { explain } from "/static/tips.js";

const $ = (id) => document.getElementById(id);
const SILENCE_MS = 30000;
const RETRY_MS = 2000;
const ANSWER_MS = 5000;
const KINDS = {
  joined: "+ joined", left: "− left", died: "✕ fell silent", moved: "→ moved", paused: "‖ paused", resumed: "▶ is back",
  stage_empty: "! stage empty",
  stage_served: "✓ stage served", rewound: "↶ went back", checkpoint: "◆ checkpoint", decay: "↘ decay", coordinator: "◇ coordinator",
  stands_still: "! stands still", goes_on: "▶ goes on", trouble: "! in trouble", started: "▶ started", ended: "■ ended",
};

let state = null;
let source = null;
let heardAt = 0;
let triedAt = 0;
let axis = "step";
let sort = { key: "stage", ascending: true };

function merge(target, patch) {
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete target[key];
    else if (value.constructor === Object && target[key]?.constructor === Object) merge(target[key], value);
    else target[key] = value;
  }
}

function connect() {
  triedAt = Date.now();
  source = new EventSource("/events");
  source.addEventListener("state", (event) => take(() => {
    state = JSON.parse(event.data);
    shownEvents = ""; // another process may number them otherwise
  }));
  source.addEventListener("patch", (event) => take(() => merge(state, JSON.parse(event.data))));
  source.onerror = () => lose();
}

function take(change) {
  heardAt = Date.now();
  change();
  document.body.classList.remove("stale");
  $("banner").hidden = true;
  render();
}

async function lose() {
  source.close();
  document.body.classList.add("stale");
  $("connection").textContent = "not connected";
  const since = heardAt ? ` What you see is of ${clock(heardAt)}.` : "";
  let why = ["done", "ended"].includes(state?.run.state)
    ? "The run is over, and the program that showed this page does not answer any more."
    : "The program that shows this page does not answer; the run itself may well go on.";
  try {
    const answer = await fetch("/events", { method: "HEAD", signal: AbortSignal.timeout(ANSWER_MS) });
    if (answer.status === 401) why = "This page's link does not hold any more: open the one that the program printed.";
    else if (answer.status === 503) why = "As many people look already as the program lets in.";
    else if (answer.ok) why = "The connection broke.";
  } catch { /* nobody answers */ }
  $("banner").textContent = `${why} This page tries again by itself.${since}`;
  $("banner").hidden = false;
  setTimeout(connect, RETRY_MS);
}

function render() {
  if (state === null) return;
  const run = state.run;
  document.title = `${run.step}/${run.steps} ${run.name}`;
  $("title").textContent = `Run ${run.name}`;
  $("connection").textContent = `live, as of ${clock(state.now * 1000)}, your time`;
  showRun(run);
  showStages();
  showPeers();
  showEvents();
  showContributions();
  $("join").hidden = $("to-join").hidden = !state.join;
  $("sample-length").textContent = ` of ${amount(run.sample_tokens)} tokens`;
  $("step-samples").textContent = ` ${amount(run.batch_size)}`;
  if (state.join && $("join-line").textContent !== state.join) $("join-line").textContent = state.join;
  const hasCurves = Object.keys(state.history).length > 0;
  $("curves").hidden = !hasCurves;
  $("no-curves").hidden = hasCurves;
  if (hasCurves) drawCharts(state.history, axis);
}

const SENTENCES = {
  done: "■ All steps are made. The coordinator saves the model and ends the run.",
  training: "▶ Training.",
  starting: "◔ Starting: all stages have peers, and the first step is on its way.",
  "no peers": "! No peer is seen. Training waits until peers join.",
};

function showRun(run) {
  const empty = Object.keys(state.stages).filter((stage) => state.stages[stage].is_empty);
  const waiting = `! Waiting: stage ${empty.join(" and stage ")} has no serving peer. Training goes on as soon as it has one.`;
  const standing = `! The run stands still, ${run.standstill}.`;
  const sentence = run.state === "standing" ? standing : SENTENCES[run.state] ?? waiting;
  const more = run.state === "waiting" && run.standstill ? ` It stands still, ${run.standstill}.` : "";
  $("run-state").textContent = run.state === "ended" ? `■ Ended: ${run.ended}.` : sentence + more;
  $("run-state").className = `lead ${["waiting", "no peers", "standing"].includes(run.state) ? "bad" : ""}`;
  $("trains").textContent = `Trains ${run.trains}.`;
  $("progress").max = run.steps;
  $("progress").value = run.step;
  const done = (100 * run.step / run.steps).toFixed(1);
  $("progress-text").textContent = `step ${amount(run.step)} of ${amount(run.steps)} (${done}%)`;
  const figures = {
    "Loss": run.loss?.toFixed(4),
    "Validation loss": run.validation_loss?.toFixed(4),
    "Tokens per second": amount(run.tokens_per_s),
    "Time left, at this speed": duration(run.eta_s),
    "One step takes": duration(run.step_s),
    "Tokens so far": amount(run.tokens),
    "Running for": duration(run.age_s),
    "Samples for next step": `${amount(run.batch_samples)} of ${amount(run.batch_size)}`,
    "Targets of a step, about": amount(run.batch_targets),
    "Peers": amount(run.peers),
    "Devices busy": run.busy === undefined ? undefined : `${Math.round(100 * run.busy)}%`,
  };
  showFigures(Object.entries(figures).filter(([, value]) => value !== undefined));
}

const WORDS = {
  "Loss": "loss", "Validation loss": "loss", "Tokens per second": "token", "Tokens so far": "token", "One step takes": "step",
  "Samples for next step": "step", "Targets of a step, about": "target", "Peers": "peer", "Devices busy": "busy",
};

// The same boxes stay as long as the same figures are there, so that focus and explanation do.
function showFigures(figures) {
  const names = figures.map(([name]) => name).join();
  if ($("figures").dataset.names !== names) {
    $("figures").dataset.names = names;
    $("figures").replaceChildren(...figures.map(([name]) => {
      const box = document.createElement("div"), term = element("dt", name);
      if (WORDS[name]) explain(term, WORDS[name]);
      box.append(term, document.createElement("dd"));
      return box;
    }));
  }
  figures.forEach(([, value], at) => { $("figures").children[at].lastElementChild.textContent = value; });
}

function element(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

const percent = (share) => share === undefined ? "–" : `${share}%`;

function showStages() {
  const demand = state.run.state === "waiting" ? 0 : state.run.tokens_per_s;
  const rows = Object.entries(state.stages).map(([stage, row]) => ({
    key: stage,
    className: row.is_empty ? "empty" : row.is_bottleneck ? "bottleneck" : "",
    cells: [
      { text: row.is_empty ? `✕ ${stage}` : row.is_bottleneck ? `▼ ${stage}` : stage },
      { text: row.is_empty ? "none" : String(row.serving) },
      { text: [row.joining && `${row.joining} joining`, row.draining && `${row.draining} leaving`, row.paused && `${row.paused} paused`].filter(Boolean).join(", ") },
      { text: row.supply ? amount(row.supply) : "–" },
      { text: demand !== undefined && row.supply ? `${Math.round(100 * demand / row.supply)}%` : "–" },
      { text: percent(row.busy) },
      { text: percent(row.waits) },
      { text: String(row.queue) },
      { text: row.limit },
    ],
  }));
  showTable($("stage-table"), [
    { title: "Stage", word: "stage" }, { title: "Peers serving", word: "peer", number: true }, { title: "Coming and going" },
    { title: "Can do, tokens/s", word: "capacity", number: true }, { title: "In use", word: "capacity", number: true },
    { title: "Busy", word: "busy", number: true }, { title: "Waits", word: "busy", number: true },
    { title: "Queue", word: "queue", number: true, minor: true }, { title: "What limits it", long: true },
  ], rows);
  const decision = state.decision, lines = [];
  if (decision) {
    const length = state.run.sample_tokens;
    lines.push(`The coordinator moves peers to the stages where they help most. Its last decision: ${decision.reason || "none yet"}`
      + (decision.reason?.includes("samples/s") ? ` (a sample is ${amount(length)} tokens).` : "."));
    for (const [peer, [from, to, reason]] of Object.entries(decision.moves)) {
      lines.push(`→ ${state.peers[peer]?.name || "Peer"} …${peer.slice(-8)} moves from stage ${from} to stage ${to}: ${reason}.`);
    }
  } else lines.push("No coordinator is seen: training goes on without one, but no peer is moved and no checkpoint is saved.");
  $("decision").replaceChildren(...lines.map((line) => element("p", line.replace(/\.\.$/, "."))));
}

const COLUMNS = [
  { title: "Peer", key: "name", word: "peer", long: true }, { title: "Stage", key: "stage", word: "stage", number: true },
  { title: "State", key: "state", word: "state" }, { title: "Speed, tokens/s", key: "speed", word: "speed", number: true },
  { title: "Busy", key: "busy", word: "busy", number: true }, { title: "Waits", key: "waits", word: "busy", number: true },
  { title: "Samples", key: "samples", word: "sample", number: true }, { title: "Share", key: "share", word: "share", number: true },
  { title: "Moves", key: "moves", word: "moves", number: true, minor: true }, { title: "Here for", key: "since", number: true },
  { title: "Device", key: "device", long: true }, { title: "Reached", key: "reached", word: "reached", minor: true },
  { title: "Note", key: "note", word: "note", long: true },
];

const noteOf = (peer) => [peer.note, peer.why].filter(Boolean).join("; ");

function showPeers() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const all = Object.entries(state.peers);
  const found = all.filter(([id, peer]) => {
    const text = `${id} ${peer.name} ${peer.device} ${peer.state} ${noteOf(peer)} ${peer.version} ${peer.label ?? ""} stage ${peer.stage}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const value = (peer) => {
    const told = sort.key === "note" ? noteOf(peer) : peer[sort.key];
    return typeof told === "string" ? told : Number(told ?? -1);
  };
  found.sort(([idA, a], [idB, b]) => {
    const [x, y] = [value(a), value(b)];
    const order = typeof x === "string" ? x.localeCompare(y) : x - y;
    return (sort.ascending ? order : -order) || (idA < idB ? -1 : 1);
  });
  const rows = found.map(([id, peer]) => {
    const shown = stateOf(peer.state);
    return {
      key: id,
      className: peer.state === "gone" ? "gone" : "",
      cells: [
        { text: peer.name || "(no name)", more: `…\u2060${id.slice(-8)}${peer.label ? `, invite ${peer.label}` : ""}`, title: id },
        { text: peer.stage < 0 ? "–" : String(peer.stage) },
        { text: shown.text, className: `state ${shown.className}` },
        { text: peer.speed ? amount(peer.speed) : "–" },
        { text: percent(peer.busy) },
        { text: percent(peer.waits) },
        { text: amount(peer.samples) ?? "–" },
        { text: peer.share === undefined ? "–" : `${peer.share.toFixed(1)}%` },
        { text: String(peer.moves ?? 0) },
        { text: peer.since ? ago(state.now - peer.since) : "–", title: peer.since ? when(peer.since) : "" },
        { text: peer.device, title: peer.version && `Swarm ${peer.version}` },
        { text: peer.reached ?? "–", title: peer.neighbours?.join("\n") },
        { text: noteOf(peer) },
      ],
    };
  });
  $("peer-count").textContent = words.length ? `${found.length} of ${all.length} peers` : `${all.length} peer${all.length === 1 ? "" : "s"}`;
  showTable($("peer-table"), COLUMNS, rows, { sort, onSort: (key) => {
    sort = { key, ascending: sort.key === key ? !sort.ascending : true };
    showPeers();
  } });
}

let shownEvents = "";

function showEvents() {
  const kind = $("kind").value;
  const numbers = Object.keys(state.events).map(Number).sort((a, b) => b - a);
  const key = `${kind} ${numbers[0]} ${numbers.length}`;
  if (key === shownEvents) return; // the list may be scrolled
  shownEvents = key;
  const events = numbers.map((number) => state.events[number]).filter((event) => !kind || event.kind === kind);
  $("events").replaceChildren(...events.map((event) => {
    const item = document.createElement("li");
    const bad = ["died", "stage_empty", "rewound", "stands_still", "trouble"].includes(event.kind);
    const time = element("time", when(event.time));
    time.dateTime = new Date(event.time * 1000).toISOString();
    item.append(time, element("span", KINDS[event.kind] ?? event.kind, bad ? "bad" : ""), element("span", event.text));
    return item;
  }));
  if (!events.length) $("events").append(element("li", "Nothing of that kind has happened yet."));
}

function showContributions() {
  const rows = Object.entries(state.contributions).sort(([, a], [, b]) => b.samples - a.samples).map(([key, row]) => ({
    key,
    cells: [
      { text: row.who }, { text: row.by }, { text: String(row.peers) },
      { text: amount(row.samples) }, { text: `${row.share.toFixed(1)}%` }, { text: row.hours ? duration(row.hours * 3600) : "some minutes" },
    ],
  }));
  showTable($("contribution-table"), [
    { title: "Who", long: true }, { title: "Known by" }, { title: "Peers so far", word: "peer", number: true },
    { title: "Samples", word: "sample", number: true }, { title: "Share of the work", word: "share", number: true }, { title: "Time served", number: true },
  ], rows);
}

function chooseAxis(chosen) {
  axis = chosen;
  $("by-step").setAttribute("aria-pressed", String(axis === "step"));
  $("by-hour").setAttribute("aria-pressed", String(axis === "hour"));
  render();
}

$("by-step").onclick = () => chooseAxis("step");
$("by-hour").onclick = () => chooseAxis("hour");
$("search").oninput = () => state && showPeers();
$("kind").onchange = () => state && showEvents();
$("kind").append(...Object.entries(KINDS).map(([kind, words]) => {
  const option = element("option", words);
  option.value = kind;
  return option;
}));
$("copy").onclick = async () => {
  try {
    await navigator.clipboard.writeText(state.join);
    $("copied").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren($("join-line"));
    $("copied").textContent = "Selected: copy it with the keyboard.";
  }
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
addEventListener("resize", render);
setInterval(() => {
  if (Date.now() - Math.max(heardAt, triedAt) > SILENCE_MS && source.readyState !== EventSource.CLOSED) lose();
}, 5000);
history.replaceState(null, "", "/"); // the token stays out of bookmarks and screenshots
connect();
