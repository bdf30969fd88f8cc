"use strict";
// A chat over /v1/chat/completions, or, for a model without a chat template, a text over /v1/completions that the two
// write in turn. The conversation and the key live in this page only.
const at = (id) => document.getElementById(id);
let messages = [];
let running = null; // the AbortController of the answer under way
let chats = true; // whether the model has a chat template

const headers = () => {
  const key = at("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
};

function show(role, text, failed) {
  const box = document.createElement("article");
  box.className = failed ? "failed" : role;
  const who = document.createElement("h2");
  who.textContent = role === "user" ? "You" : failed ? "Error" : "Model";
  const body = document.createElement("div");
  body.textContent = text;
  box.append(who, body);
  at("log").append(box);
  follow(true);
  return body;
}

function follow(always) {
  const log = at("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

function busy(on) {
  at("send").hidden = on;
  at("stop").hidden = !on;
}

function request() {
  const body = { stream: true, stream_options: { include_usage: true } };
  const system = at("system").value.trim();
  if (!chats) body.prompt = messages.map((m) => m.content).join("");
  else body.messages = system ? [{ role: "system", content: system }, ...messages] : [...messages];
  for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"]) {
    const value = at(name).value;
    if (value !== "") body[name] = Number(value);
  }
  return body;
}

// Calls `take` with the data of each event.
async function events(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", ended = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) {
      if (!ended) throw new Error("The answer was cut off.");
      return;
    }
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: [DONE]")) ended = true;
      if (part.startsWith("data: ")) take(part.slice(6));
    }
  }
}

async function answer() {
  const conversation = messages; // "New chat" starts another one meanwhile
  const started = performance.now();
  running = new AbortController();
  busy(true);
  at("status").textContent = "The model is reading.";
  let text = "", first = 0, usage = null, body = null;
  const take = (data) => {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) usage = chunk.usage;
    const piece = chats ? chunk.choices?.[0]?.delta?.content : chunk.choices?.[0]?.text;
    if (!piece) return;
    if (!first) { first = performance.now(); at("status").textContent = "The model is writing."; }
    text += piece;
    body.textContent = text;
    follow(false);
  };
  try {
    const response = await fetch(chats ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(request()),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    body = show("assistant", "");
    await events(response, take);
    const seconds = (performance.now() - (first || started)) / 1000;
    at("status").textContent = usage
      ? `${usage.completion_tokens} tokens, ${(usage.completion_tokens / seconds).toFixed(1)} per second; first after ${((first - started) / 1000).toFixed(2)} s.`
      : "";
  } catch (error) {
    const stopped = error.name === "AbortError";
    at("status").textContent = stopped ? "Stopped." : "The answer failed.";
    if (!stopped) show("assistant", error.message, true);
  } finally {
    if (text) conversation.push({ role: "assistant", content: text });
    else if (body) body.parentElement.remove();
    running = null;
    busy(false);
    at("text").focus();
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = at("text").value;
  const text = chats ? typed.trim() : typed; // a text goes on after the very characters
  const goesOn = !chats && !text && messages.length > 0; // nothing to add: the model writes on
  if (running || !(chats ? text : text || goesOn)) return;
  at("text").value = "";
  if (!goesOn) {
    if (messages.at(-1)?.role === "user") messages.pop(); // its answer failed
    messages.push({ role: "user", content: text });
    show("user", text);
  }
  answer();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  at("log").replaceChildren();
  at("status").textContent = "";
  at("text").focus();
});

async function look() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) return; // without its key: asked again when one is typed
    const model = (await response.json()).data[0];
    at("model").textContent = document.title = model.id;
    chats = model.chat;
    at("system").parentElement.hidden = !chats;
    at("text").required = chats;
    if (chats) return;
    at("text").placeholder = "Text to continue: Enter sends, Shift+Enter makes a new line; an empty box lets the model go on";
    at("status").textContent = "This model has no chat template: it continues your text.";
  } catch {
    at("status").textContent = "The server does not answer.";
  }
}
at("key").addEventListener("change", look);
look();
