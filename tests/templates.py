"""Chat templates that are made like those of Qwen's hybrids and coders, in other words."""

LISTED_CALLS = """\
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function if call.function is defined else call %}
        {%- if loop.first %}
            {{- {first} + '<tool_call>\\n<function=' + call.name + '>\\n' }}
        {%- else %}
            {{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
        {%- endif %}
        {%- for name, value in (call.arguments or {}) | items %}
            {%- set plain = value is string or not (value is mapping or value is sequence) %}
            {%- set text = value | string if plain else value | tojson %}
            {{- '<parameter=' + name + '>\\n' + text + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
"""
RESULTS = """\
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem is undefined or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- raise_exception('nobody has that role') }}
    {%- endif %}
{%- endfor %}
"""
TOOLS = """\
    {{- 'Tools:' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\nCall one so:\\n<tool_call>\\n<function=its_name>\\n<parameter=a_name>\\nvalue\\n' }}
    {{- '</parameter>\\n</function>\\n</tool_call>' }}
"""
HYBRID_TEMPLATE = (
    """\
{%- macro text_of(content, plain) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {%- if 'text' in part %}
                {{- part.text }}
            {%- elif plain %}
                {{- raise_exception('a system message shows nothing') }}
            {%- else %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}{{- raise_exception('nothing was said') }}{%- endif %}
{%- set head = messages[0] if messages[0].role == 'system' else none %}
{%- if tools or head %}
    {{- '<|im_start|>system\\n' }}
    {%- if tools %}
"""
    + TOOLS
    + """\
    {%- endif %}
    {%- if head %}
        {{- ('\\n\\n' if tools else '') + text_of(head.content, true) | trim }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(asked=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if ns.asked < 0 %}{{- raise_exception('nobody asks') }}{%- endif %}
{%- for message in messages %}
    {%- set content = text_of(message.content, message.role == 'system') | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('systems speak first') }}{%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts = (message.reasoning_content or '') | trim %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.asked %}
            {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
"""
    + LISTED_CALLS.replace("{first}", "('\\n\\n' if content else '')")
    + """\
        {{- '<|im_end|>\\n' }}
"""
    + RESULTS
    + """\
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""
)
"""Like Qwen3.5's: an answer begins in thoughts, a system message stands first, a user asks."""
CODER_TEMPLATE = (
    """\
{%- set head = messages[0] if messages and messages[0].role == 'system' else none %}
{%- if tools or head %}
    {{- '<|im_start|>system\\n' + (head.content if head else 'You help.') }}
    {%- if tools %}
        {{- '\\n\\n' }}
"""
    + TOOLS
    + """\
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set rest = messages[1:] if head else messages %}
{%- for message in rest %}
    {%- if message.role in ('user', 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = (message.content or '') | trim %}
        {{- '<|im_start|>assistant' + ('\\n' + content if content else '') }}
"""
    + LISTED_CALLS.replace("{first}", "'\\n'")
    + """\
        {{- '<|im_end|>\\n' }}
"""
    + RESULTS
    + """\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""As Qwen3-Coder's and Coder-Next's: no thoughts."""
LLAMA_TEMPLATE = """\
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
    {%- if tools and loop.first %}
        {{- 'Respond in the format {"name": function name, "parameters": its arguments}. ' }}
        {{- tools | tojson }}
    {%- endif %}
    {%- if m.tool_calls | length > 1 %}{{- raise_exception('one call at once') }}{%- endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '{"name": "' + call.function.name + '", ' }}
        {{- '"parameters": ' + (call.function.arguments | tojson) + '}' }}
    {%- endfor %}
    {{- m.content + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"""
"""As Llama 3's: a call is all of an answer."""
HARMONY_TEMPLATE = """\
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- '<|start|>system<|message|>' + (model_identity or 'You are a model.') + '\\n' }}
{{- 'Reasoning: ' + reasoning_effort + '\\n\\n' }}
{{- '# Tools\\n\\n' + builtin_tools | join if builtin_tools else '' }}
{{- '# Valid channels: analysis, commentary, final.' }}
{{- '\\nCalls to these tools must go to the commentary channel: functions.' if tools else '' }}
{{- '<|end|>' }}
{%- set head = messages[0].content if messages[0].role in ('system', 'developer') else '' %}
{%- set rest = messages[1:] if messages[0].role in ('system', 'developer') else messages %}
{%- if head or tools %}
    {{- '<|start|>developer<|message|>' }}
    {{- '# Instructions\\n\\n' + head + '\\n\\n' if head else '' }}
    {%- if tools %}
        {{- '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}
        {%- for tool in tools %}
            {%- set tool = tool.function %}
            {{- '// ' + tool.description + '\\ntype ' + tool.name }}
            {{- ' = (_: ' + tool.parameters | tojson + ') => any;\\n\\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for m in rest %}
    {%- if m.role == 'assistant' %}
        {%- for text in (m.content, m.thinking) if text and '<|channel|>final<|message|>' in text %}
            {{- raise_exception('channels are no text') }}
        {%- endfor %}
        {%- if 'tool_calls' in m %}
            {%- set later = namespace(final=false) %}
            {%- for other in rest[loop.index:] if other.role == 'assistant' %}
                {%- if 'tool_calls' not in other %}{%- set later.final = true %}{%- endif %}
            {%- endfor %}
            {%- set call = m.tool_calls[0].function %}
            {%- if m.content and m.thinking %}
                {{- raise_exception('text or thoughts stand before a call, not both') }}
            {%- elif (m.content or m.thinking) and not later.final %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
                {{- (m.content or m.thinking) + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
            {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
            {%- set called.name = call.name %}
        {%- else %}
            {%- if loop.last and not add_generation_prompt and m.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
            {%- set called.name = none %}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {{- raise_exception('nobody has called a tool') if called.name is none else '' }}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary' }}
        {{- '<|message|>' + m.content | tojson + '<|end|>' }}
    {%- elif m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""As gpt-oss': messages with channels; one call in each, and results that name its tool."""
GEMMA_TEMPLATE = """\
{{- bos_token }}
{%- set system = messages[0].role == 'system' %}
{%- if system and not folds %}{{- raise_exception('nobody speaks first but users') }}{%- endif %}
{%- set rest = messages[1:] if system else messages %}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('users and assistants take turns') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- messages[0].content + '\\n\\n' if system and loop.first else '' }}
    {{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
GEMMA_2_TEMPLATE = "{%- set folds = false %}" + GEMMA_TEMPLATE
"""As Gemma 2's: users and the model take turns, and nobody else."""
GEMMA_3_TEMPLATE = "{%- set folds = true %}" + GEMMA_TEMPLATE
"""As Gemma 3's: a system message stands in the first user's."""
