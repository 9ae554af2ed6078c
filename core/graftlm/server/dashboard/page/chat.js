// The chat box, which streams answers and shows the time and tokens of each answer.

import { events, posting, request } from "./api.js";
import { byId, count, duration, element, percent } from "./elements.js";

export class Chat {
  constructor() {
    this.model = null;
    this.history = [];
    this.pictures = []; // data URLs of the next message
    this.running = null; // an AbortController
    this.list = byId("messages");
    this.input = byId("chat-input");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    const area = byId("chat");
    area.addEventListener("dragover", (event) => event.preventDefault());
    area.addEventListener("drop", (event) => {
      event.preventDefault();
      this.attach(event.dataTransfer.files);
    });
    this.input.addEventListener("paste", (event) => this.attach(event.clipboardData.files));
    byId("chat-stop").addEventListener("click", () => this.running?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  /** Set the model of the chat from the server's description. */
  use({ model, has_chat_template: canChat }) {
    this.model = model;
    this.input.disabled = byId("chat-send").disabled = !canChat;
    if (!canChat) this.input.placeholder = "This model's tokenizer has no chat template";
  }

  clear() {
    this.running?.abort();
    this.history = [];
    this.pictures = [];
    byId("chat-pictures").replaceChildren();
    this.list.replaceChildren();
    this.input.focus();
  }

  /** Add picture files to the next message. */
  async attach(files) {
    for (const file of [...files].filter((one) => one.type.startsWith("image/"))) {
      const url = await dataUrl(file);
      this.pictures.push(url);
      byId("chat-pictures").append(element("img", { src: url, alt: file.name }));
    }
  }

  async send() {
    const text = this.input.value.trim();
    if (!text || this.running || this.model === null) return;
    this.input.value = "";
    const pictures = this.pictures;
    this.pictures = [];
    byId("chat-pictures").replaceChildren();
    const history = this.history;
    history.push({ role: "user", content: contentOf(text, pictures) });
    const shown = pictures.map((url) => element("img", { src: url, alt: "picture" }));
    this.show(element("div", { class: "message user" }, ...shown, text));
    const answer = new Answer();
    this.show(answer.element);
    this.busy(new AbortController());
    try {
      await this.stream(answer, history);
    } catch (error) {
      answer.fail(this.running.signal.aborted ? "stopped" : error.message);
    }
    if (answer.text.textContent) history.push({ role: "assistant", content: answer.text.textContent });
    else history.pop();
    this.busy(null);
    this.scroll();
  }

  async stream(answer, messages) {
    const body = {
      model: this.model,
      messages,
      temperature: byId("temperature").valueAsNumber || 0,
      stream: true,
      stream_options: { include_usage: true },
    };
    const response = await request("v1/chat/completions", posting(body, this.running.signal));
    for await (const event of events(response)) {
      answer.take(event);
      this.scroll();
    }
    answer.finish();
  }

  busy(controller) {
    this.running = controller;
    byId("chat-send").hidden = controller !== null;
    byId("chat-stop").hidden = controller === null;
  }

  show(message) {
    this.list.append(message);
    this.scroll();
  }

  scroll() {
    this.list.scrollTop = this.list.scrollHeight;
  }
}

/** Return the content of a message: its text, or parts if it has pictures. */
function contentOf(text, pictures) {
  if (!pictures.length) return text;
  return [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

/** One streamed answer with its figures. */
class Answer {
  constructor() {
    this.startMs = performance.now();
    this.firstMs = null;
    this.usage = null;
    this.reason = null;
    this.text = element("span", {});
    this.figures = element("div", { class: "figures" });
    this.element = element("div", { class: "message assistant waiting", "aria-busy": "true" }, this.text, this.figures);
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    this.usage = event.usage ?? this.usage;
    const choice = event.choices[0];
    this.reason = choice?.finish_reason ?? this.reason;
    const text = choice?.delta?.content;
    if (!text) return;
    this.firstMs ??= performance.now();
    this.lastMs = performance.now();
    this.element.classList.remove("waiting");
    this.text.append(text);
  }

  finish() {
    this.settle();
    if (this.usage === null) return;
    const { prompt_tokens: prompt, completion_tokens: generated, prompt_tokens_details: details } = this.usage;
    const reused = details?.cached_tokens ?? 0;
    const bar = element("span", { class: "share" }, element("span", {}));
    bar.firstChild.style.width = percent(reused / prompt).replace(" ", "");
    this.figures.append(
      element("span", { class: "reused" }, bar, `${count(reused)} of ${count(prompt)} prompt tokens reused`),
      ...this.times(generated).map((text) => element("span", {}, text)),
    );
    if (this.reason === "length") this.figures.append(element("span", {}, "cut off at the length limit"));
  }

  times(generated) {
    if (this.firstMs === null) return [`${count(generated)} tokens`];
    const first = `first after ${duration((this.firstMs - this.startMs) / 1000)}`;
    const seconds = (this.lastMs - this.firstMs) / 1000;
    // If all tokens arrived together, there is no rate.
    const rate = seconds > 0.05 ? `, ${count((generated - 1) / seconds)} a second` : "";
    return [first, `${count(generated)} tokens${rate}`];
  }

  fail(message) {
    this.settle();
    this.figures.append(element("span", { class: "error" }, message));
  }

  settle() {
    this.element.classList.remove("waiting");
    this.element.setAttribute("aria-busy", "false");
  }
}
