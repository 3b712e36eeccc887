// The Vercel AI SDK (ai, @ai-sdk/openai-compatible, @ai-sdk/anthropic) against quire.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError, Output, embed, generateObject, generateText, stepCountIs, streamText,
  tool,
} from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = (url) =>
  createOpenAICompatible({
    name: "quire", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true,
    includeUsage: true,
  });
const named = async (url) => (await (await fetch(`${url}/v1/models`)).json()).data[0].id;
const randomURL = process.env.QUIRE_RANDOM;
const parrotURL = process.env.QUIRE_PARROT;
const parrotId = await named(parrotURL);
const random = provider(randomURL)(await named(randomURL));
const parrot = provider(parrotURL)(parrotId);
const claude = createAnthropic({ baseURL: `${parrotURL}/v1`, apiKey: "none" })(parrotId);

const once = { maxRetries: 0, maxOutputTokens: 2000 };
const say = (text) => `Repeat after me: ${text}`;
const call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>';
const city = z.enum(["Paris", "Rome"]);
const Forecast = z.object({ city, days: z.number().int().min(1).max(7) });
const tools = {
  weather: tool({
    description: "What the weather is.",
    inputSchema: z.object({ city }),
    execute: async ({ city }) => `sunny in ${city}`,
  }),
};
const schemaOnly = {
  weather: tool({ description: "What the weather is.", inputSchema: z.object({ city }) }),
};

for (const [api, model] of Object.entries({ chat: parrot, messages: claude })) {
  test(`${api}: text is streamed`, async () => {
    const long = "bit by bit, ".repeat(30) + "to the end";
    const stream = streamText({ model, prompt: say(long), ...once });
    const pieces = [];
    for await (const piece of stream.textStream) pieces.push(piece);
    assert.ok(pieces.length > 1);
    assert.equal(pieces.join(""), long);
    assert.ok((await stream.usage).outputTokens > 5);
  });

  test(`${api}: thoughts are told from the text`, async () => {
    const prompt = say("<think>\nHm.\n</think>\n\nYes.");
    const answer = await generateText({ model, prompt, ...once });
    assert.equal(answer.reasoningText.trim(), "Hm.");
    assert.equal(answer.text.trim(), "Yes.");
  });

  test(`${api}: a tool is called and its answer heard, streamed and whole`, async () => {
    const asked = { model, prompt: say(call), tools, stopWhen: stepCountIs(3), ...once };
    const answer = await generateText(asked);
    assert.equal(answer.text, "sunny in Paris");
    assert.equal(answer.steps[0].toolCalls[0].toolName, "weather");
    const stream = streamText(asked);
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, "sunny in Paris");
    assert.deepEqual((await stream.steps)[0].toolCalls[0].input, { city: "Paris" });
  });
}

for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
  const name = typeof toolChoice === "string" ? toolChoice : "named";
  test(`a ${name} call satisfies its schema, streamed and whole`, async () => {
    const asked = { model: random, prompt: "Weather?", tools: schemaOnly, toolChoice, ...once };
    const whole = await generateText(asked);
    const stream = streamText(asked);
    await stream.consumeStream();
    for (const calls of [whole.toolCalls, await stream.toolCalls]) {
      assert.ok(calls.length > 0);
      for (const { input } of calls) city.parse(input.city);
    }
  });
}

test("an object is generated, however it is asked for", async () => {
  const asked = { model: random, prompt: "A forecast.", ...once };
  Forecast.parse((await generateObject({ ...asked, schema: Forecast })).object);
  const output = Output.object({ schema: Forecast });
  Forecast.parse((await generateText({ ...asked, output })).output);
});

test("errors carry their status, and are not tried again", async () => {
  const unknown = generateText({ model: provider(parrotURL)("none"), prompt: "Hello" });
  await assert.rejects(unknown, (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 404);
    assert.equal(error.isRetryable, false);
    return true;
  });
  const model = provider(randomURL).embeddingModel(random.modelId);
  await assert.rejects(embed({ model, value: "Hello", maxRetries: 0 }), (error) => {
    assert.equal(error.statusCode, 400);
    return true;
  });
});
