// The playground: one page over the same HTTP API that every other client uses.
"use strict";

const $ = (id) => document.getElementById(id);
const chat = []; // {role, content}, as sent
let running = null; // the AbortController of the answer being written

// -- settings ---------------------------------------------------------------------------------------------

for (const output of document.querySelectorAll("output")) {
  const input = $(output.htmlFor.value);
  const show = () => { output.value = input.value; };
  input.addEventListener("input", show);
  show();
}
$("key").value = sessionStorage.getItem("shoestring-key") || "";
$("key").addEventListener("change", () => sessionStorage.setItem("shoestring-key", $("key").value));
const needsKey = document.documentElement.dataset.key === "required"; // the server writes it into the page
$("key-field").hidden = !needsKey;
$("key-field").addEventListener("submit", (event) => event.preventDefault());
const mayCall = () => !needsKey || $("key").value !== "";

const THEMES = { auto: "light dark", light: "light", dark: "dark" };
function setTheme(name) {
  document.documentElement.style.colorScheme = THEMES[name];
  $("theme").textContent = name;
  localStorage.setItem("shoestring-theme", name);
}
setTheme(THEMES[localStorage.getItem("shoestring-theme")] ? localStorage.getItem("shoestring-theme") : "auto");
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf($("theme").textContent) + 1) % names.length]);
});
$("settings").addEventListener("click", () => document.body.classList.toggle("with-settings"));

function headers() {
  const key = $("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function settings() {
  const body = {
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    min_p: Number($("min_p").value),
    top_k: Number($("top_k").value) || 0,
    max_tokens: Number($("max_tokens").value) || 256,
    presence_penalty: Number($("presence_penalty").value),
    frequency_penalty: Number($("frequency_penalty").value),
    stream: true,
    stream_options: { include_usage: true },
    mark_drafts: true,
  };
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  const stops = $("stops").value.split("\n").filter((line) => line !== "");
  if (stops.length) body.stop = stops;
  return body;
}

// -- messages ---------------------------------------------------------------------------------------------

function show(role, text) {
  const message = document.createElement("div");
  message.className = `message ${role}`;
  for (const [part, content] of [["who", role], ["body", text], ["rendered", ""], ["facts", ""], ["actions", ""]]) {
    const div = document.createElement("div");
    div.className = part;
    div.textContent = content; // never HTML: a model may write anything
    message.append(div);
  }
  $("messages").append(message);
  message.scrollIntoView({ block: "end" });
  return {
    root: message,
    body: message.querySelector(".body"),
    rendered: message.querySelector(".rendered"),
    facts: message.querySelector(".facts"),
    actions: message.querySelector(".actions"),
  };
}

function button(text, title, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.title = title;
  made.addEventListener("click", () => act(made));
  return made;
}

// A whole answer is shown as Markdown; the text as it came, with drafted tokens in colour, is one click away.
function render(answer) {
  answer.rendered.replaceChildren(markdown(answer.body.textContent));
  answer.root.classList.add("as-markdown");
  answer.actions.append(
    button("raw", "The text as it came", (made) => {
      const rendered = answer.root.classList.toggle("as-markdown");
      made.textContent = rendered ? "raw" : "formatted";
    })
  );
}

// Appends text to an element, coloured by who wrote it. Tokens tell how many characters are whose; text can
// come later than its tokens (a stop string may be in the making), so what they promise is kept until then.
function painter(element) {
  const decoder = new TextDecoder();
  const owed = []; // [characters, drafted]
  return (text, tokens) => {
    for (const token of tokens || []) {
      const part = decoder.decode(new Uint8Array(token.bytes), { stream: true });
      if (part) owed.push([part.length, token.drafted]);
    }
    while (text) {
      const [length, drafted] = owed.shift() || [text.length, false];
      const piece = text.slice(0, length);
      if (piece.length < length) owed.unshift([length - piece.length, drafted]);
      text = text.slice(piece.length);
      if (drafted) {
        const span = document.createElement("span");
        span.className = "drafted";
        span.textContent = piece;
        element.append(span);
      } else element.append(piece);
    }
  };
}

// Server-sent events of a fetch: yields the parsed objects until [DONE].
async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a comment that keeps the connection open
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}

// What the model reads: of a chat all of it, with `text` as the next message; else the text alone.
function promptOf(text, isChat) {
  if (!isChat) return { prompt: text };
  const system = $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...chat];
  return { messages: text === null ? messages : [...messages, { role: "user", content: text }] };
}

async function ask(text, again = false) {
  const isChat = $("mode").value === "chat";
  const body = settings();
  if (again) {
    if (isChat && chat.length && chat[chat.length - 1].role === "assistant") chat.pop();
    $("messages").lastElementChild.remove();
  } else {
    if (isChat) chat.push({ role: "user", content: text });
    show("user", text);
  }
  for (const old of document.querySelectorAll(".again")) old.remove(); // only the last answer can be written again
  Object.assign(body, promptOf(isChat ? null : text, isChat));
  const path = isChat ? "/v1/chat/completions" : "/v1/completions";
  const answer = show("assistant", "");
  answer.root.classList.add("writing");
  running = new AbortController();
  setBusy(true);
  const began = performance.now();
  let first = null;
  let tokens = 0;
  let drafted = 0;
  const paint = painter(answer.body);
  let reason = null;
  let usage = null;
  try {
    const response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const part of events(response)) {
      if (part.error) throw new Error(part.error.message);
      if (part.usage) usage = part.usage;
      const choice = part.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason || reason;
      paint((isChat ? choice.delta.content : choice.text) || "", choice.tokens);
      if (!choice.tokens || !choice.tokens.length) continue;
      const now = performance.now();
      if (first === null) first = now;
      else {
        // The first piece began the clock, so it does not count.
        tokens += choice.tokens.length;
        answer.facts.textContent = `${(tokens / Math.max(0.001, (now - first) / 1000)).toFixed(1)} tok/s`;
      }
      drafted += choice.tokens.filter((token) => token.drafted).length;
      const box = $("messages");
      if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped by you";
    else {
      answer.root.classList.add("error");
      answer.body.append(`${answer.body.textContent ? "\n" : ""}${error.message}`);
    }
  }
  const end = performance.now();
  answer.root.classList.remove("writing");
  if (reason) {
    const facts = [reason];
    if (usage) {
      const total = usage.completion_tokens;
      facts.unshift(`${usage.prompt_tokens} + ${total} tokens`);
      if (drafted) facts.push(`${Math.round((100 * drafted) / total)}% drafted`);
      if (first !== null && total > 1) {
        facts.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
        facts.push(`then ${((total - 1) / Math.max(0.001, (end - first) / 1000)).toFixed(1)} tok/s`);
      }
    }
    answer.facts.textContent = facts.join(" · ");
  }
  if (isChat) {
    if (answer.root.classList.contains("error")) chat.pop(); // so that the next try is not two questions
    else chat.push({ role: "assistant", content: answer.body.textContent });
  }
  if (!answer.root.classList.contains("error") && answer.body.textContent) render(answer);
  const redo = button("regenerate", "Write this answer again", () => running || ask(text, true));
  redo.className = "again";
  if (!(isChat && answer.root.classList.contains("error"))) answer.actions.append(redo);
  running = null;
  setBusy(false);
  countTokens();
}

// -- the tokens of the prompt -----------------------------------------------------------------------------

let counting = null;
function countSoon() {
  clearTimeout(counting);
  counting = setTimeout(countTokens, 400);
}

async function countTokens() {
  clearTimeout(counting);
  const text = $("text").value;
  const isChat = $("mode").value === "chat";
  if (!mayCall() || (!text && !(isChat && chat.length))) {
    $("count").textContent = "";
    $("pieces").replaceChildren();
    return;
  }
  const wanted = $("tokens").open;
  try {
    const response = await fetch("/tokenize", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({ ...promptOf(text || null, isChat && known), return_token_strs: wanted }),
    });
    const told = await response.json();
    if (!response.ok) throw new Error(told.error.message);
    $("count").textContent = `${told.count} of ${told.max_model_len}`;
    const spans = (told.token_strs || []).slice(0, 4000).map((piece, number) => {
      const span = document.createElement("span");
      span.textContent = piece;
      span.title = String(told.tokens[number]);
      return span;
    });
    $("pieces").replaceChildren(...spans);
  } catch (error) {
    $("count").textContent = error.message;
  }
}
$("text").addEventListener("input", countSoon);
$("system").addEventListener("input", countSoon);
$("mode").addEventListener("change", countSoon);
$("tokens").addEventListener("toggle", countTokens);

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
  if (!busy) $("text").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (running || !text.trim()) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  chat.length = 0;
  $("messages").replaceChildren();
  countSoon();
});

// -- the server's state -----------------------------------------------------------------------------------

let known = false;
async function poll() {
  if (!mayCall()) {
    $("model").textContent = "this server asks for an API key: enter it here";
    setTimeout(poll, 300);
    return;
  }
  try {
    const response = await fetch("/stats", { headers: headers() });
    const stats = await response.json();
    if (!response.ok) throw new Error(stats.error.message);
    $("model").textContent = `${stats.model}, context ${stats.max_context}`;
    $("running").textContent = stats.num_running;
    $("waiting").textContent = stats.num_waiting;
    $("kv").value = stats.kv_usage;
    $("kv-text").textContent = `${Math.round(100 * stats.kv_usage)}%`;
    $("rate").textContent = stats.tokens_per_s.toFixed(1);
    $("drafts").hidden = !stats.drafter;
    const share = stats.num_drafted ? (100 * stats.num_accepted) / stats.num_drafted : 0;
    $("accepted").textContent = `${share.toFixed(0)}%`;
    if (!known) {
      known = true;
      if (!stats.chat) {
        $("mode").value = "text";
        $("mode").querySelector('[value="chat"]').disabled = true; // the model has no chat template
      }
    }
  } catch (error) {
    $("model").textContent = `not connected: ${error.message}`;
  }
  setTimeout(poll, document.hidden ? 5000 : 500);
}
poll();
