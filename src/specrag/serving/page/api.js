// What the page asks of the server. Failures come as ApiError, in words that can be shown.

const KEY = "specrag-key";
let askForKey = async () => false;

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Have `asker(reason)` called where the server wants a key; it answers whether there is a new one. */
export function onKeyWanted(asker) {
  askForKey = asker;
}

export function setKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    memory = key;
  }
}

let memory = "";

/** The key that requests are sent with; empty for none. */
export function currentKey() {
  try {
    return sessionStorage.getItem(KEY) ?? memory;
  } catch {
    return memory; // a browser that forbids storage keeps the key as long as the page
  }
}

export function headers() {
  const key = currentKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Why the server cannot answer questions now, by what is not ready; empty where it can. */
export async function hindrances() {
  try {
    const response = await fetch("readyz", { headers: headers() });
    if (response.status !== 503) return {};
    // Reasons are told to whoever has a key; the usual one is assumed.
    return (await response.json()).reasons ?? { model: "loading" };
  } catch {
    throw new ApiError(UNREACHABLE);
  }
}

export async function getJson(path, signal) {
  return (await ask(path, { signal })).json();
}

/** Ask for something to be deleted; the server's answer. */
export async function remove(path) {
  return (await ask(path, { method: "DELETE" })).json();
}

/** The objects of a stream of server-sent events, as they come. Leaving the loop ends the request. */
export async function* events(path, body, signal) {
  const response = await ask(path, withJson(body, signal));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await read(reader, signal);
      if (done) throw new ApiError("The server ended the stream before the answer was complete.");
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(inWords(event.error.message), event.error.code ?? 0);
        yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/** Send a file with `progress(share)` of what has left this machine; the server's answer to it. */
export async function upload(path, file, progress) {
  for (;;) {
    const answer = await send(path, file, progress);
    if (answer.status === 401 && (await askForKey(messageOf(answer.body)))) continue;
    if (answer.status >= 200 && answer.status < 300) return answer.body;
    throw failure(answer.status, answer.body, answer.retryAfter);
  }
}

function send(path, file, progress) {
  return new Promise((resolve, reject) => {
    const form = new FormData();
    form.append("files", file, file.name);
    // fetch tells nothing of how much it has sent.
    const request = new XMLHttpRequest();
    request.open("POST", path);
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (event) => {
      if (event.lengthComputable) progress(event.loaded / event.total);
    });
    request.addEventListener("error", () => reject(new ApiError(UNREACHABLE)));
    request.addEventListener("load", () => {
      let body = null;
      try {
        body = JSON.parse(request.responseText);
      } catch {
        // Not from specrag: the status says enough.
      }
      resolve({ status: request.status, body, retryAfter: request.getResponseHeader("Retry-After") });
    });
    request.send(form);
  });
}

const UNREACHABLE = "The server does not answer. Is specrag serve still running?";

function withJson(body, signal) {
  return { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal };
}

async function ask(path, options) {
  for (;;) {
    let response;
    try {
      response = await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new ApiError(UNREACHABLE);
    }
    if (response.ok) return response;
    const body = await response.json().catch(() => null);
    if (response.status === 401 && (await askForKey(messageOf(body)))) continue;
    throw failure(response.status, body, response.headers.get("Retry-After"));
  }
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  }
}

function messageOf(body) {
  return body?.error?.message ?? "";
}

function failure(status, body, retryAfter) {
  const said = inWords(messageOf(body));
  if (status === 429) {
    const wait = retryAfter ? ` Try again in ${retryAfter} s.` : " Try again soon.";
    return new ApiError(`${said || "The server has too much to do."}${wait}`, status);
  }
  return new ApiError(said || `The server refused (status ${status}).`, status);
}

/** A message as a sentence: "k 99: give a whole number" becomes "k 99: give a whole number." */
function inWords(message) {
  const text = (message ?? "").trim();
  return !text || /[.!?]$/.test(text) ? text : `${text}.`;
}
