"""A model's text on the page."""

from typing import Any

from playwright.sync_api import expect

from tests.page.checks.hostile import ATTRIBUTES, ELEMENTS, TEXTS
from tests.page.checks.steps import accessible, answered, ask, no_overflow
from tests.page.visit import NARROW, Browser, shot

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script> **bold <b>not</b>**"
CODE = "\n```python\nprint('<script>')\n```\n- one `x<y`\n- two"
FORMS = """# Heading

A [link](https://example.com/a) and https://example.com/b, ~~struck~~ and *slanted*.
A second line. ![A picture](https://example.com/p.png)
[![Inside](https://example.com/i.png)](https://example.com/c)

| left | right |
|------|------:|
| 1    | 2     |

> A quotation
> > in a quotation

1. one
   - nested
     - deeper
2. two

- [ ] to do
- [x] done

---

```python
def page(n: int) -> str:
    return f"page {n}"  # a comment
```

```unheard-of
x < y
```

#### Low

See [below].

[below]: https://example.com/below
"""
# Renders texts with the page's own view, and collects its elements, attributes and links.
LOOK = """async (texts) => {
  const { MarkdownView } = await import("/page/markdown.js");
  globalThis.hacked = () => { globalThis.wasHacked = true; };
  // Not the whole page: its memory is drawn when the server has answered, which may be now.
  const around = () => document.querySelectorAll("head *, body > *, #messages *").length;
  const before = around();
  const seen = { elements: {}, attributes: {}, links: [] };
  for (const text of texts) {
    const target = document.createElement("div");
    target.className = "text";
    document.querySelector("#messages").append(target);
    const view = new MarkdownView(target);
    for (let end = 7; end < Math.min(text.length, 400); end += 7) view.write(text.slice(0, end));
    view.write(text);
    view.end(text);
    await new Promise((resolve) => setTimeout(resolve, 20));
    for (const element of target.querySelectorAll("*")) {
      seen.elements[element.localName] = true;
      for (const { name } of element.attributes) seen.attributes[name] = true;
      const { href, rel, target } = element;
      if (href) seen.links.push([element.getAttribute("href"), rel, target]);
    }
    target.remove();
  }
  return { elements: Object.keys(seen.elements), attributes: Object.keys(seen.attributes),
    links: seen.links, hacked: globalThis.wasHacked === true,
    grown: around() - before };
}"""
# In milliseconds: each text bit by bit, and the longest that one step of it took.
WRITE = """async (texts) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const found = [];
  for (const text of texts) {
    const target = document.createElement("div");
    const view = new MarkdownView(target);
    let [all, longest] = [0, 0];
    const timed = (run) => {
      const began = performance.now();
      run();
      const took = performance.now() - began;
      all += took;
      longest = Math.max(longest, took);
    };
    const step = Math.ceil(text.length / 100);
    for (let end = step; end < text.length; end += step) {
      timed(() => view.write(text.slice(0, end)));
    }
    timed(() => view.end(text));
    found.push({ all, longest, shown: target.textContent.length });
  }
  return found;
}"""
SAME = """async (text) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const shown = (write) => {
    const target = document.createElement("div");
    write(new MarkdownView(target));
    return [target.textContent, target.querySelectorAll("*").length, target];
  };
  const whole = shown((view) => view.end(text));
  const different = [];
  for (const size of [1, 3, 10, 64]) {
    const [, , target] = shown((view) => {
      for (let end = size; end < text.length; end += size) view.write(text.slice(0, end));
      view.write(text);
      view.end(text);
    });
    // Colours come when their grammars have.
    await new Promise((resolve) => setTimeout(resolve, 300));
    if (target.innerHTML !== whole[2].innerHTML) different.push([size, target.textContent]);
  }
  return different;
}"""


def markdown_is_shown_whole_and_code_in_colours(browser: Browser) -> None:
    with browser.page(browser.parrot) as page:
        ask(page, f"Repeat after me: {FORMS}")
        answered(page)
        text = page.locator(".answer .text").last
        expect(text.locator("h3")).to_have_text(["Heading", "Low"])
        links = {link.inner_text(): link for link in text.locator("a").all()}
        assert list(links) == [
            "link",
            "https://example.com/b",
            "A picture",
            "Inside",
            "below",
        ]
        for link in links.values():
            assert link.get_attribute("target") == "_blank"
            assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        assert links["A picture"].get_attribute("href") == "https://example.com/p.png"
        assert links["Inside"].get_attribute("href") == "https://example.com/c"
        expect(text.locator("td")).to_have_text(["1", "2"])
        expect(text.locator("td.right")).to_have_text("2")
        expect(text.locator("blockquote blockquote")).to_have_text("in a quotation")
        expect(text.locator("ol > li > ul > li > ul > li")).to_have_text("deeper")
        expect(text.locator("li.task")).to_have_text(["☐ to do", "☑ done"])
        expect(text.locator("hr")).to_have_count(1)
        expect(text.locator("s")).to_have_text("struck")
        expect(text.locator(".hljs-keyword").first).to_have_text("def")
        expect(text.locator(".code pre")).to_have_count(2)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        copy = text.get_by_role("button", name="Copy code").last
        copy.click()
        expect(text.get_by_role("button", name="Copied")).to_have_count(1)
        assert page.evaluate("navigator.clipboard.readText()") == "x < y"
        page.get_by_role("button", name="Copy answer").click()
        assert str(page.evaluate("navigator.clipboard.readText()")).startswith("# Heading\n")
        accessible(page)
        shot(page, "markdown")


def what_a_model_writes_is_text_and_never_markup(browser: Browser) -> None:
    with browser.page(browser.parrot) as page:
        page.on("dialog", lambda _: (_ for _ in ()).throw(AssertionError("a script ran")))
        thought = f"<think>\n{EVIL}\n</think>\n\n"
        ask(page, f"Repeat after me: {thought}{EVIL}\n{CODE}")
        answered(page)
        answer = page.locator(".answer").last
        expect(answer.locator(".thought")).to_contain_text("<img src=x onerror=alert(1)>")
        text = answer.locator(".text")
        expect(text).to_contain_text("<img src=x onerror=alert(1)><script>alert(2)</script>")
        expect(text.locator("strong")).to_have_text("bold <b>not</b>")
        expect(text.locator("pre code")).to_have_text("print('<script>')")
        expect(text.locator("li")).to_have_count(2)
        expect(text.locator("li code")).to_have_text("x<y")
        shot(page, "markup")
        for kind in ("img", "script", "b"):
            assert page.locator(f"#messages {kind}").count() == 0


def hostile_text_is_inert(browser: Browser) -> None:
    with browser.page(browser.parrot, expected=("requires 'TrustedHTML' assignment",)) as page:
        found: dict[str, Any] = page.evaluate(LOOK, list(TEXTS))
        assert set(found["elements"]) <= ELEMENTS, set(found["elements"]) - ELEMENTS
        assert set(found["attributes"]) <= ATTRIBUTES, set(found["attributes"]) - ATTRIBUTES
        for address, rel, target in found["links"]:
            assert address.startswith(("http://", "https://", "mailto:")), address
            assert (rel, target) == ("noopener noreferrer nofollow", "_blank")
        assert found["grown"] == 0
        assert not found["hacked"]
        # The last defence, were all others gone: this page makes markup of no text, and runs none.
        assert (
            page.evaluate(
                """() => {
              try {
                document.createElement("div").innerHTML = "<b>markup</b>";
                return "made";
              } catch (error) {
                return error.name;
              }
            }"""
            )
            == "TypeError"
        )
    with browser.page(browser.parrot, viewport=NARROW) as page:
        ask(page, "Repeat after me: " + "\n\n".join(text[:300] for text in TEXTS))
        answered(page)
        assert not page.evaluate("'wasHacked' in globalThis")
        expect(page.locator("#messages :is(img, script, style, iframe, form, svg)")).to_have_count(
            0
        )
        no_overflow(page)
        shot(page, "hostile")


def a_text_looks_the_same_written_bit_by_bit_and_at_once(browser: Browser) -> None:
    lists = "1. a\n\n2. b\n\n   c\n\n10. d\n\npara\n- x\n\n  y\n\n      z\n\nSetext\n===\n\n"
    lists += "    code\n\n"
    with browser.page(browser.parrot) as page:
        for text in (
            FORMS,
            lists,
            "a\r\nb\r\n\r\nc",
            f"{lists}```js\nlet a;\n\n\nlet b;",
            *TEXTS[:20],
        ):
            assert page.evaluate(SAME, text) == [], text


def long_and_crooked_texts_are_shown_while_nobody_waits(browser: Browser) -> None:
    size = 40_000
    texts = [
        FORMS * 250,
        "word " * size,
        "```js\n" + "let a = [1, 2];\n\n" * 10_000,
        *(
            (text * size)[:size]
            for text in ("[", "![", "*a ", "`a``", "<a", "a@b.", "http://x", "|a")
        ),
        *((text * size)[:size] for text in ("> ", "- ", "1) ", "[a](", "\\", "&a;", "~~a", "**a_")),
        "|a|\n|-|\n" + "|b|\n" * 10_000,
    ]
    with browser.page(browser.demo) as page:
        for text, found in zip(texts, page.evaluate(WRITE, texts), strict=True):
            assert found["shown"] > 0, text[:20]
            # Other load of the machine is part of this time.
            assert found["longest"] < 3000, (text[:20], found)
