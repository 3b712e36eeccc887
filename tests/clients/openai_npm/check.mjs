// The openai package of npm against quire.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI, { BadRequestError, NotFoundError } from "openai";

const sdk = (url, settings = {}) =>
  new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, ...settings });
const random = sdk(process.env.QUIRE_RANDOM);
const parrot = sdk(process.env.QUIRE_PARROT);
const randomModel = (await random.models.list()).data[0].id;
const model = (await parrot.models.list()).data[0].id;

const say = (text) => [{ role: "user", content: `Repeat after me: ${text}` }];
const call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>';
const forecast = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Paris", "Rome"] },
    days: { type: "integer", minimum: 1, maximum: 7 },
  },
  required: ["city", "days"],
  additionalProperties: false,
};
const weather = { name: "get_weather", description: "What the weather is.", parameters: forecast };
const tools = [{ type: "function", function: weather }];

function holds(value) {
  assert.ok(["Paris", "Rome"].includes(value.city), JSON.stringify(value));
  assert.ok(value.days >= 1 && value.days <= 7, JSON.stringify(value));
}

async function collected(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

// --- models and chat -------------------------------------------------------------------------

test("a model is listed and found by its name", async () => {
  const found = await parrot.models.retrieve(model);
  assert.equal(found.object, "model");
  assert.equal(found.id, model);
});

test("chat streams the same answer, and usage last", async () => {
  const stream = await parrot.chat.completions.create({
    model, messages: say("one two three"), stream: true, stream_options: { include_usage: true },
  });
  const chunks = await collected(stream);
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(text, "one two three");
  assert.ok(chunks.at(-1).usage.completion_tokens > 3);
});

// --- tools -----------------------------------------------------------------------------------

test("a call that the model chose to make comes back", async () => {
  const answer = await parrot.chat.completions.create({ model, messages: say(call), tools });
  const [made] = answer.choices[0].message.tool_calls;
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  assert.equal(made.function.name, "get_weather");
  assert.deepEqual(JSON.parse(made.function.arguments), { city: "Paris" });
});

test("a streamed call is put together by its index", async () => {
  const stream = parrot.chat.completions.stream({ model, messages: say(`${call}\n${call}`), tools });
  const { tool_calls } = (await stream.finalChatCompletion()).choices[0].message;
  assert.equal(tool_calls.length, 2);
  assert.notEqual(tool_calls[0].id, tool_calls[1].id);
  for (const made of tool_calls) {
    assert.deepEqual(JSON.parse(made.function.arguments), { city: "Paris" });
  }
});

test("tools are run and their answers heard", async () => {
  const runner = parrot.chat.completions.runTools({
    model,
    messages: say(call),
    tools: [{
      type: "function",
      function: {
        ...weather, parse: JSON.parse, function: ({ city }) => `sunny in ${city}`,
      },
    }],
  });
  assert.equal(await runner.finalContent(), "sunny in Paris");
});

for (const tool_choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
  const name = typeof tool_choice === "string" ? tool_choice : "named";
  test(`a ${name} call satisfies its schema, whole and streamed`, async () => {
    const body = {
      model: randomModel, messages: say("nothing"), tools, tool_choice, max_tokens: 2000,
    };
    const whole = await random.chat.completions.create(body);
    const streamed = await random.chat.completions.stream(body).finalChatCompletion();
    for (const { choices } of [whole, streamed]) {
      assert.ok(choices[0].message.tool_calls.length > 0);
      for (const made of choices[0].message.tool_calls) holds(JSON.parse(made.function.arguments));
    }
  });
}

// --- structured output -----------------------------------------------------------------------

test("a schema is kept to, whole and streamed", async () => {
  const body = {
    model: randomModel, messages: say("nothing"), max_tokens: 2000,
    response_format: {
      type: "json_schema", json_schema: { name: "forecast", strict: true, schema: forecast },
    },
  };
  const whole = await random.chat.completions.create(body);
  const streamed = await random.chat.completions.stream(body).finalChatCompletion();
  for (const { choices } of [whole, streamed]) holds(JSON.parse(choices[0].message.content));
});

// --- completions, embeddings, errors ---------------------------------------------------------

test("completions continue prompts", async () => {
  const body = { model: randomModel, prompt: ["Once", "Twice"], max_tokens: 4, temperature: 0 };
  const { choices } = await random.completions.create(body);
  assert.deepEqual(choices.map(({ index }) => index), [0, 1]);
  const chunks = await collected(await random.completions.create({ ...body, stream: true }));
  for (const { index, text } of choices) {
    const parts = chunks.flatMap((chunk) => chunk.choices).filter((part) => part.index === index);
    assert.equal(parts.map((part) => part.text).join(""), text);
  }
});

test("errors have the classes that callers catch", async () => {
  const messages = say("hello");
  await assert.rejects(parrot.chat.completions.create({ model: "gpt-none", messages }), (error) => {
    assert.ok(error instanceof NotFoundError);
    assert.equal(error.code, "model_not_found");
    return true;
  });
  const long = parrot.chat.completions.create({ model, messages: say("long ".repeat(20_000)) });
  await assert.rejects(long, (error) => {
    assert.ok(error instanceof BadRequestError);
    assert.equal(error.code, "context_length_exceeded");
    assert.match(error.message, /maximum context length is \d+ tokens/);
    return true;
  });
});

// --- responses -------------------------------------------------------------------------------

test("responses answer, and remember what was said", async () => {
  const first = await parrot.responses.create({ model, input: "Repeat after me: one" });
  assert.equal(first.output_text, "one");
  assert.equal(first.status, "completed");
  const second = await parrot.responses.create({
    model, input: "Repeat after me: two", previous_response_id: first.id,
  });
  assert.equal(second.output_text, "two");
  assert.ok(second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens);
});

test("responses stream events in order", async () => {
  const stream = parrot.responses.stream({ model, input: "Repeat after me: bit by bit" });
  const events = await collected(stream);
  assert.equal((await stream.finalResponse()).output_text, "bit by bit");
  assert.equal(events[0].type, "response.created");
  assert.equal(events.at(-1).type, "response.completed");
  events.forEach((event, number) => assert.equal(event.sequence_number, number));
});

test("responses call functions and take their answers", async () => {
  const flat = [{ type: "function", strict: false, ...weather }];
  const input = [{ role: "user", content: `Repeat after me: ${call}` }];
  const first = await parrot.responses.create({ model, input, tools: flat });
  const made = first.output.find((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(made.arguments), { city: "Paris" });
  const answer = { type: "function_call_output", call_id: made.call_id, output: "sunny" };
  const second = await parrot.responses.create({
    model, tools: flat, input: [...input, ...first.output, answer],
  });
  assert.equal(second.output_text, "sunny");
});

test("responses keep to a schema", async () => {
  const answer = await random.responses.create({
    model: randomModel, input: "A forecast.", max_output_tokens: 2000,
    text: { format: { type: "json_schema", name: "forecast", strict: true, schema: forecast } },
  });
  holds(JSON.parse(answer.output_text));
});
