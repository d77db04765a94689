// llama.cpp behind the part of OpenAI's interface that the benches use, for one client at a time.
//
// `node llama_cpp.mjs FOLDER GGUF PORT`; FOLDER is where `npm install node-llama-cpp` was run, which brings llama.cpp
// compiled for every kind of x86-64 processor. A request gives its prompt as token ids in `prompt`, so that every engine
// reads the same tokens. What the last prompt had in common with this one is not read again.

import http from "node:http";
import os from "node:os";
import path from "node:path";
import {pathToFileURL} from "node:url";

const [folder, gguf, port] = process.argv.slice(2);
const entry = path.join(path.resolve(folder), "node_modules", "node-llama-cpp", "dist", "index.js");
const {getLlama} = await import(pathToFileURL(entry).href);

const threads = os.availableParallelism();
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads});
const model = await llama.loadModel({modelPath: gguf});
const context = await model.createContext({
    contextSize: 4096,
    batchSize: 512,
    flashAttention: true,
    threads: {ideal: threads, min: threads}
});
const sequence = context.getSequence();

async function answer(body, send) {
    const ends = new Set(body.stop_token_ids);
    const known = sequence.compareContextTokens(body.prompt).firstDifferentIndex;
    const kept = Math.min(known, body.prompt.length - 1);
    await sequence.eraseContextTokenRanges([{start: kept, end: sequence.nextTokenIndex}]);
    const tokens = [];
    let said = "";
    for await (const token of sequence.evaluate(body.prompt.slice(kept), {temperature: 0, yieldEogToken: true})) {
        tokens.push(token);
        const ended = ends.has(token) && !body.ignore_eos;
        if (!ended) {
            const text = model.detokenize(tokens);
            send({choices: [{delta: {content: text.slice(said.length)}}]});
            said = text;
        }
        if (ended || tokens.length === body.max_tokens)
            break;
    }
    const usage = {
        prompt_tokens: body.prompt.length,
        completion_tokens: tokens.length,
        prompt_tokens_details: {cached_tokens: kept}
    };
    send({choices: [], usage});
}

http.createServer(async (request, response) => {
    if (request.method === "GET") {
        response.writeHead(request.url === "/health" ? 200 : 404).end();
        return;
    }
    const parts = [];
    for await (const part of request)
        parts.push(part);
    response.writeHead(200, {"Content-Type": "text/event-stream"});
    const send = (chunk) => response.write(`data: ${JSON.stringify(chunk)}\n\n`);
    try {
        await answer(JSON.parse(Buffer.concat(parts).toString()), send);
    } catch (error) {
        send({error: String(error)});
    }
    response.end("data: [DONE]\n\n");
}).listen(Number(port), "127.0.0.1");
