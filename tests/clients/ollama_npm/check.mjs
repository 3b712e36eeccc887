// The ollama package of npm against quire.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Ollama } from "ollama";

const [random, parrot, embedder] = ["RANDOM", "PARROT", "EMBEDDER"].map(
  (name) => new Ollama({ host: process.env[`QUIRE_${name}`] }),
);
const nameOf = async (client) => (await client.list()).models[0].model;
const [randomModel, model, embeddingModel] = [
  await nameOf(random), await nameOf(parrot), await nameOf(embedder),
];

const say = (text) => [{ role: "user", content: `Repeat after me: ${text}` }];
const call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>';
const forecast = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{
  type: "function",
  function: { name: "get_weather", description: "What the weather is.", parameters: forecast },
}];

async function collected(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

test("models are listed, shown and running", async () => {
  assert.equal((await parrot.list()).models[0].digest.length, 64);
  const shown = await random.show({ model: randomModel });
  assert.equal(shown.model_info["qwen3.context_length"], 8192);
  assert.deepEqual(shown.capabilities, ["completion", "tools", "thinking"]);
  assert.ok((await random.ps()).models[0].size > 0);
  assert.match((await random.version()).version, /^\d+\.\d+\.\d+$/);
});

test("a chat answers, whole and streamed", async () => {
  const answer = await parrot.chat({ model, messages: say("Grüße 🙂") });
  assert.equal(answer.message.content, "Grüße 🙂");
  assert.equal(answer.done_reason, "stop");
  assert.ok(answer.total_duration >= answer.prompt_eval_duration);
  const parts = await collected(await parrot.chat({ model, messages: say("one two"), stream: true }));
  assert.equal(parts.map((part) => part.message.content).join(""), "one two");
  assert.deepEqual(parts.map((part) => part.done).indexOf(true), parts.length - 1);
});

test("a stream can be left", async () => {
  const long = "a word ".repeat(500);
  const stream = await parrot.chat({ model, messages: say(long), stream: true });
  await assert.rejects(async () => {
    for await (const _ of stream) stream.abort();
  }, { name: "AbortError" });
});

test("a tool is called and its answer heard, in the words in which it was called", async () => {
  const messages = say(`Let me look.\n${call}`);
  const { message } = await parrot.chat({ model, messages, tools });
  assert.equal(message.tool_calls[0].function.name, "get_weather");
  assert.deepEqual(message.tool_calls[0].function.arguments, { city: "Paris" });
  const heard = { role: "tool", tool_name: "get_weather", content: "sunny" };
  const last = await parrot.chat({ model, messages: [...messages, message, heard], tools });
  assert.equal(last.message.content, "sunny");
});

test("a schema is kept to", async () => {
  const body = {
    model: randomModel, messages: say("x"), format: forecast, options: { num_predict: 2000 },
  };
  const whole = JSON.parse((await random.chat(body)).message.content);
  const parts = await collected(await random.chat({ ...body, stream: true }));
  const streamed = JSON.parse(parts.map((part) => part.message.content).join(""));
  for (const { city } of [whole, streamed]) assert.ok(["Paris", "Rome"].includes(city));
});

test("a text is generated, and a model loaded without one", async () => {
  const answer = await parrot.generate({ model, prompt: "Repeat after me: one" });
  assert.equal(answer.response, "one");
  const body = { model, prompt: "Repeat after me: two", stream: true };
  const parts = await collected(await parrot.generate(body));
  assert.equal(parts.map((part) => part.response).join(""), "two");
  assert.equal((await parrot.generate({ model, prompt: "" })).done_reason, "load");
});

test("texts become vectors", async () => {
  const { embeddings } = await embedder.embed({ model: embeddingModel, input: ["one", "two"] });
  assert.equal(embeddings.length, 2);
  const { embedding } = await embedder.embeddings({ model: embeddingModel, prompt: "one" });
  assert.equal(embedding.length, embeddings[0].length);
});

test("errors say what is wrong", async () => {
  await assert.rejects(parrot.chat({ model: "gpt", messages: say("x") }), (error) => {
    assert.equal(error.status_code, 404);
    assert.equal(error.message, "model 'gpt' not found");
    return true;
  });
  const long = say("long ".repeat(20_000));
  await assert.rejects(parrot.chat({ model, messages: long, stream: true }), /maximum context/);
  await assert.rejects(parrot.pull({ model: "qwen3" }), /downloads no model on request/);
});
