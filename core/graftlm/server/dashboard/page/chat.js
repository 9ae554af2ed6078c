// The chat box, which streams answers and shows the time and tokens of each answer.

import { events, posting, request } from "./api.js";
import { byId, count, duration, element, percent } from "./elements.js";

export class Chat {
  constructor() {
    this.model = null;
    this.history = [];
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
    this.list.replaceChildren();
    this.input.focus();
  }

  async send() {
    const text = this.input.value.trim();
    if (!text || this.running || this.model === null) return;
    this.input.value = "";
    const history = this.history;
    history.push({ role: "user", content: text });
    this.show(element("div", { class: "message user" }, text));
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
