// Requests to the page's server, with an API key if the server requires one.

import { byId } from "./elements.js";

const KEY = "graftlm-api-key";

/** A refusal by the server, with its status and reason. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * Send a request. While the server answers 401, ask the user for a key and repeat the request. Throws ApiError.
 *
 * If the user has closed the dialog without a key, this function does not show the dialog again; it throws.
 */
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers };
    if (key) headers.Authorization = `Bearer ${key}`;
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    if (response.status !== 401) throw new ApiError(response.status, await reason(response));
    // Another request may have asked for the key in the meantime.
    if (sessionStorage.getItem(KEY) !== key) continue;
    const question = key ? "The server does not accept this key." : "The server asks for a key.";
    if (declined || !(await askForKey(question))) throw new ApiError(401, "the server asks for a key");
  }
}

/** Send a request and return the JSON of the answer. */
export async function requestJson(path, options) {
  return (await request(path, options)).json();
}

/** Return the options of a POST request with a JSON body. */
export function posting(body, signal = null) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

let asking = null;
let declined = false;

/** Show one dialog for all waiting requests. Resolves to whether the user entered a key. */
export function askForKey(question) {
  asking ??= new Promise((resolve) => showDialog(question, resolve)).finally(() => (asking = null));
  return asking;
}

function showDialog(question, resolve) {
  const [dialog, form, input] = [byId("key-dialog"), byId("key-form"), byId("key-input")];
  byId("key-reason").textContent = question;
  let given = false;
  form.onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, input.value);
    given = true;
    dialog.close();
  };
  byId("key-cancel").onclick = () => dialog.close();
  dialog.onclose = () => {
    input.value = "";
    declined = !given;
    resolve(given);
  };
  dialog.showModal();
}

/** Yield the data of each server-sent event until `[DONE]`. Throws Error if the response ends earlier. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the answer was cut off");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
