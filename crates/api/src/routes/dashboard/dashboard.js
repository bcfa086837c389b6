"use strict";
// Whatever comes from the API is put on the page as text, never as markup.
const TIERS = ["hot", "hibernated", "parked", "archived", "stopped"];
const COLUMNS = [
  ["name", "Name", p => p.name],
  ["tier", "Tier", p => TIERS.indexOf(p.tier ?? "stopped")],
  ["state", "State", p => p.state],
  ["memory", "Memory", p => p.memory.pss_bytes, "number"],
  ["idle", "Idle", p => p.idle_ms ?? -1, "number"],
  ["wakes", "Wakes", p => p.wakes, "number"],
  ["last", "Last wake", p => p.last_wake ? p.last_wake.total_us : -1, "number"],
  ["command", "Command", p => p.spec.command.join(" ")],
];
const at = id => document.getElementById(id);
const state = { procs: [], sort: "name", down: false, one: null, why: null, events: [], last: 0, token: sessionStorage.getItem("kip-token") };

function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024 || unit === "GiB") return `${n >= 100 || unit === "B" ? Math.round(n) : n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
}
function micros(us) {
  return us < 1000 ? `${us} us` : us < 1e6 ? `${(us / 1e3).toFixed(us < 1e4 ? 2 : 1)} ms` : `${(us / 1e6).toFixed(2)} s`;
}
function span(ms) {
  const s = Math.round(ms / 1000);
  return s < 60 ? `${s} s` : s < 3600 ? `${Math.floor(s / 60)} min` : s < 86400 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
}
function element(name, text, ...classes) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  made.classList.add(...classes);
  return made;
}
function svg(name, attributes, ...classes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.classList.add(...classes);
  return made;
}

class Refused extends Error {}

async function ask(path, options = {}) {
  const headers = state.token ? { authorization: `Bearer ${state.token}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", ...options });
  if (answer.status === 401 || answer.status === 403) throw new Refused((await answer.json()).message);
  if (!answer.ok) throw new Error((await answer.json()).message);
  return answer;
}
const read = async path => (await ask(path)).json();

function trouble(text) {
  at("trouble").hidden = !text;
  at("trouble").textContent = text ?? "";
}

function totals(now) {
  const cards = TIERS.filter(tier => tier !== "stopped" || now.stopped).map(tier => [tier, now[tier], `--${tier}`]);
  cards.push(["memory held", bytes(now.held_bytes), "--held"], ["memory saved", bytes(now.saved_bytes), "--saved"]);
  at("totals").replaceChildren(...cards.map(([label, value, colour]) => {
    const card = element("div");
    card.dataset.total = label;
    card.append(element("b", value), element("span", label));
    card.style.setProperty("--colour", `var(${colour})`);
    return card;
  }));
}

const HIGH = 160, LEFT = 60, BELOW = 18, ABOVE = 8;
function frame(where, samples, most, label) {
  // In pixels, so that words are not stretched.
  const WIDE = Math.max(at(where).clientWidth, 200);
  const begin = samples[0].at_ms, end = Math.max(samples.at(-1).at_ms, begin + 1);
  const x = ms => LEFT + (ms - begin) / (end - begin) * (WIDE - LEFT - 8);
  const y = n => HIGH - BELOW - n / Math.max(most, 1) * (HIGH - BELOW - ABOVE);
  const chart = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img" });
  const text = (x, y, words, anchor) => {
    const made = svg("text", { x, y, "text-anchor": anchor });
    made.textContent = words;
    chart.append(made);
  };
  const finish = () => {
    text(LEFT - 6, y(most) + 8, label(most), "end");
    text(LEFT - 6, y(0), label(0), "end");
    text(LEFT, HIGH - 4, `${span(end - begin)} ago`, "start");
    text(WIDE - 8, HIGH - 4, "now", "end");
    return chart;
  };
  return { chart, x, y, finish };
}
function legend(where, names) {
  at(where).replaceChildren(...names.map(name => {
    const one = element("span");
    one.append(element("i", undefined, name), name);
    return one;
  }));
}
function draw(history) {
  // One look is no line: it counts from when it was made on.
  const samples = history.samples.length > 1 ? history.samples : [{ ...history.samples[0], at_ms: history.samples[0].at_ms - 1000 }, history.samples[0]];
  const now = samples.at(-1);
  totals(now);
  const sum = s => TIERS.reduce((all, tier) => all + s[tier], 0);
  const most = Math.max(1, ...samples.map(sum));
  const tiers = frame("tiers", samples, most, n => n);
  const below = samples.map(() => 0);
  for (const tier of TIERS) {
    const low = below.map((n, i) => [tiers.x(samples[i].at_ms), tiers.y(n)]);
    samples.forEach((s, i) => { below[i] += s[tier]; });
    const high = below.map((n, i) => [tiers.x(samples[i].at_ms), tiers.y(n)]);
    const path = svg("path", { d: `M${[...high, ...low.reverse()].map(p => p.map(n => n.toFixed(1)).join(" ")).join("L")}Z` }, tier);
    path.dataset.now = now[tier];
    tiers.chart.append(path);
  }
  at("tiers").replaceChildren(tiers.finish());
  legend("tiers-legend", TIERS);
  const memory = frame("memory", samples, Math.max(1, ...samples.flatMap(s => [s.held_bytes, s.saved_bytes])), bytes);
  for (const [of, key] of [["held", "held_bytes"], ["saved", "saved_bytes"]]) {
    const d = `M${samples.map(s => `${memory.x(s.at_ms).toFixed(1)} ${memory.y(s[key]).toFixed(1)}`).join("L")}`;
    memory.chart.append(svg("path", { d, "vector-effect": "non-scaling-stroke" }, `${of}-line`));
  }
  at("memory").replaceChildren(memory.finish());
  legend("memory-legend", ["held", "saved"]);
}

function heads() {
  at("procs").tHead.rows[0].replaceChildren(...COLUMNS.map(([key, title, , kind]) => {
    const head = element("th", undefined, ...(kind ? [kind] : []));
    const button = element("button", title + (state.sort === key ? state.down ? " ↓" : " ↑" : ""));
    button.type = "button";
    button.dataset.sort = key;
    button.addEventListener("click", () => {
      state.down = state.sort === key && !state.down;
      state.sort = key;
      table();
    });
    head.append(button);
    return head;
  }));
}
function row(p) {
  const made = element("tr");
  made.dataset.proc = p.name;
  made.tabIndex = 0;
  made.setAttribute("aria-selected", p.name === state.one);
  const tier = element("td");
  tier.append(element("i", undefined, "tier", p.tier ?? "stopped"), p.tier ?? "none");
  const memory = p.pids.length ? bytes(p.memory.pss_bytes) : "–";
  const command = element("td", p.spec.command.join(" "), "command");
  command.title = command.textContent;
  const last = p.last_wake ? `${micros(p.last_wake.total_us)} from ${p.last_wake.from}` : "–";
  const idle = p.idle_ms === null ? "–" : span(p.idle_ms);
  made.append(element("td", p.name), tier, element("td", p.state), element("td", memory, "number"), element("td", idle, "number"),
    element("td", p.wakes, "number"), element("td", last, "number"), command);
  const open = () => { state.one = p.name; state.why = null; table(); one(); };
  made.addEventListener("click", open);
  made.addEventListener("keydown", e => { if (e.key === "Enter") open(); });
  return made;
}
function table() {
  heads();
  const value = COLUMNS.find(([key]) => key === state.sort)[2];
  const sorted = [...state.procs].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return (x < y ? -1 : x > y ? 1 : a.name < b.name ? -1 : 1) * (state.down ? -1 : 1);
  });
  at("procs").tBodies[0].replaceChildren(...sorted.map(row));
  at("none").hidden = sorted.length > 0;
}

function waterfall(wake) {
  const parts = [];
  const all = Math.max(wake.total_us, wake.steps.reduce((sum, step) => sum + step.us, 0), 1);
  let begun = 0;
  for (const { name, us } of wake.steps) {
    const bar = svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none" });
    bar.append(svg("rect", { x: begun / all * 1000, y: 0, width: Math.max(us / all * 1000, 2), height: 10 }, "step"));
    begun += us;
    const time = element("span", micros(us));
    time.dataset.us = us;
    time.dataset.step = name;
    parts.push(element("span", name), bar, time);
  }
  return parts;
}
async function one() {
  const name = state.one;
  const p = state.procs.find(p => p.name === name);
  at("one").hidden = !p;
  if (!p) return;
  at("one-name").textContent = p.name;
  at("one-state").textContent = `${p.state}${p.tier ? `, ${p.tier}` : ""}; ${p.spec.command.join(" ")}`;
  const wake = p.last_wake;
  at("wake").textContent = wake ? `${micros(wake.total_us)} from ${wake.from}, for ${wake.trigger}, ${span(Date.now() - wake.at_ms)} ago` : "It has not slept and woken yet.";
  at("waterfall").replaceChildren(...(wake ? waterfall(wake) : []));
  const slept = p.last_sleep;
  at("slept").textContent = slept ? `to ${slept.to}, frozen ${micros(slept.frozen_us)} of ${micros(slept.total_us)}, ${bytes(slept.bytes_written)} written, ${span(Date.now() - slept.at_ms)} ago` : "It has not slept yet.";
  const mine = state.events.filter(e => e.name === name).slice(-50).reverse();
  at("one-events").replaceChildren(...mine.map(e => element("li", `${new Date(e.at_ms).toLocaleTimeString()} ${e.kind} ${e.detail}`)));
  if (state.why !== `${name} ${p.state} ${p.wakes}`) {
    // Once for each change: the look at one that runs takes a second.
    state.why = `${name} ${p.state} ${p.wakes}`;
    at("why").replaceChildren(element("li", "looking ..."));
    try {
      const why = await read(`/v1/procs/${encodeURIComponent(name)}/why`);
      if (state.one !== name) return;
      const lines = [...why.awake_because, ...why.cannot_sleep.map(line => `cannot sleep: ${line}`)];
      if (why.next_wake) lines.push(`its next wake is by ${why.next_wake.kind}, in ${span(why.next_wake.due_ms)}`);
      if (!lines.length) lines.push(p.pids.length && p.state === "running" ? "nothing keeps it awake" : "it sleeps until a packet or a call comes");
      at("why").replaceChildren(...lines.map(line => element("li", line)));
    } catch (e) {
      at("why").replaceChildren(element("li", e.message));
    }
  }
}

let asked = false, again = false;
async function refresh() {
  // One at a time, and once more for what came meanwhile.
  if (asked) { again = true; return; }
  asked = true;
  try {
    const [info, procs, history] = await Promise.all([read("/v1/info"), read("/v1/procs"), read("/v1/history")]);
    state.procs = procs;
    at("about").textContent = `${info.version} on ${info.worker}, ${info.data}; ${info.wakes_last_minute} wakes in the last minute`;
    at("main").hidden = false;
    at("login").hidden = true;
    draw(history);
    table();
    one();
    trouble();
  } catch (e) {
    if (e instanceof Refused) return login(e.message);
    trouble(`${e.message}: trying again`);
  } finally {
    asked = false;
    if (again) { again = false; setTimeout(refresh, 100); }
  }
}

async function follow() {
  for (;;) {
    try {
      const answer = await ask(`/v1/events?follow=true&since=${state.last}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        text += value;
        const lines = text.split("\n");
        text = lines.pop();
        for (const line of lines.filter(Boolean)) {
          const event = JSON.parse(line);
          if (!event.kind) continue;
          state.last = event.id;
          state.events.push(event);
        }
        state.events.splice(0, state.events.length - 2000);
        refresh();
      }
      trouble("the daemon has ended the connection: trying again");
    } catch (e) {
      if (e instanceof Refused) return;
      trouble(`no connection to the daemon (${e.message}): trying again`);
    }
    await new Promise(done => setTimeout(done, 1000));
  }
}

function login(message) {
  at("main").hidden = true;
  at("login").hidden = false;
  at("refused").textContent = state.token ? message : "";
  sessionStorage.removeItem("kip-token");
  state.token = null;
  at("token").focus();
}
function begin() {
  refresh().then(() => {
    if (!at("main").hidden) follow();
    // The daemon could not be asked, and the page says so; a user who has to give a token begins by
    // that.
    else if (at("login").hidden) setTimeout(begin, 1000);
  });
}
document.addEventListener("DOMContentLoaded", () => {
  at("login").addEventListener("submit", e => {
    e.preventDefault();
    state.token = at("token").value.trim();
    sessionStorage.setItem("kip-token", state.token);
    at("token").value = "";
    begin();
  });
  at("close").addEventListener("click", () => { state.one = null; table(); one(); });
  addEventListener("resize", () => { if (!at("main").hidden) refresh(); });
  setInterval(() => { if (!at("main").hidden) refresh(); }, 10000);
  begin();
});
