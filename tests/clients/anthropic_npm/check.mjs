// @anthropic-ai/sdk against quire.

import assert from "node:assert/strict";
import { test } from "node:test";

import Anthropic, { BadRequestError, NotFoundError } from "@anthropic-ai/sdk";

const sdk = (baseURL) => new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const named = async (url) => (await (await fetch(`${url}/v1/models`)).json()).data[0].id;
const random = sdk(process.env.QUIRE_RANDOM);
const parrot = sdk(process.env.QUIRE_PARROT);
const randomModel = await named(process.env.QUIRE_RANDOM);
const model = await named(process.env.QUIRE_PARROT);

const say = (text) => [{ role: "user", content: `Repeat after me: ${text}` }];
const call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>';
const tools = [{
  name: "get_weather",
  description: "What the weather is.",
  input_schema: {
    type: "object",
    properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
}];
const ask = (messages, more = {}) => ({ model, max_tokens: 2000, messages, ...more });

test("messages stream the same answer", async () => {
  const stream = parrot.messages.stream(ask(say("bit by bit")));
  let text = "";
  stream.on("text", (piece) => { text += piece; });
  const answer = await stream.finalMessage();
  assert.equal(text, "bit by bit");
  assert.equal(answer.content[0].text, text);
  assert.equal(answer.stop_reason, "end_turn");
  assert.ok(answer.usage.output_tokens > 3);
});

test("tokens are counted as they are charged, and markers do not count", async () => {
  const system = [{ type: "text", text: "Be brief." }];
  const marked = [{ ...system[0], cache_control: { type: "ephemeral" } }];
  const counted = await parrot.messages.countTokens({ model, system, messages: say("hi"), tools });
  const again = await parrot.messages.countTokens({
    model, system: marked, messages: say("hi"), tools,
  });
  assert.deepEqual(counted, again);
  const { usage } = await parrot.messages.create(ask(say("hi"), { system, tools }));
  const cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
  assert.equal(usage.input_tokens + cached, counted.input_tokens);
});

test("a tool is used and its result heard, streamed and whole", async () => {
  const whole = await parrot.messages.create(ask(say(call), { tools }));
  const streamed = await parrot.messages.stream(ask(say(call), { tools })).finalMessage();
  for (const answer of [whole, streamed]) {
    assert.equal(answer.stop_reason, "tool_use");
    const use = answer.content.find(({ type }) => type === "tool_use");
    assert.deepEqual(use.input, { city: "Paris" });
    const result = [{ type: "tool_result", tool_use_id: use.id, content: "sunny" }];
    const last = await parrot.messages.create(ask([
      ...say(call),
      { role: "assistant", content: answer.content },
      { role: "user", content: result },
    ], { tools }));
    assert.equal(last.content.at(-1).text, "sunny");
  }
});

for (const type of ["any", "tool"]) {
  test(`a tool that must be used (${type}) gets input of its schema`, async () => {
    const tool_choice = type === "any" ? { type } : { type, name: "get_weather" };
    const body = ask(say("nothing"), { model: randomModel, tools, tool_choice });
    const whole = await random.messages.create(body);
    const streamed = await random.messages.stream(body).finalMessage();
    for (const answer of [whole, streamed]) {
      const use = answer.content.find((block) => block.type === "tool_use");
      assert.ok(["Paris", "Rome"].includes(use.input.city));
    }
  });
}

test("thoughts are blocks of their own, and come back in", async () => {
  const thinking = { type: "enabled", budget_tokens: 1024 };
  const messages = say("<think>\nHm.\n</think>\n\nYes.");
  const body = ask(messages, { thinking });
  const whole = await parrot.messages.create(body);
  const streamed = await parrot.messages.stream(body).finalMessage();
  for (const { content } of [whole, streamed]) {
    assert.deepEqual(content.map(({ type }) => type), ["thinking", "text"]);
    assert.equal(content[0].thinking.trim(), "Hm.");
    assert.equal(content[1].text.trim(), "Yes.");
    const again = [...messages, { role: "assistant", content }, ...say("fine")];
    const answer = await parrot.messages.create({ ...body, messages: again });
    assert.equal(answer.content.at(-1).text, "fine");
  }
});

test("errors have the classes that callers catch", async () => {
  await assert.rejects(parrot.messages.create(ask(say("hi"), { model: "claude-none" })), (error) => {
    assert.ok(error instanceof NotFoundError);
    assert.equal(error.error.error.type, "not_found_error");
    return true;
  });
  await assert.rejects(parrot.messages.create(ask(say("long ".repeat(20_000)))), (error) => {
    assert.ok(error instanceof BadRequestError);
    assert.equal(error.error.type, "error");
    assert.equal(error.error.error.type, "invalid_request_error");
    return true;
  });
});
