"""Chat templates in the style of Gemma's, and gpt-oss's own."""

from pathlib import Path

GEMMA = """\
{{ bos_token }}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<|turn>' + role + '\\n' + (message['content'] | trim) + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn>model\\n' }}
{%- endif %}
"""

THINKING = """\
{{ bos_token }}
{% for message in messages if message.role != 'tool' %}
    {% if message.role == 'assistant' %}
<|turn>model
{{ message.content.split('<channel|>') | last | trim }}<turn|>
    {% elif message.role == 'system' and not loop.first %}
        {{ raise_exception('the system message comes first') }}
    {% else %}
<|turn>{{ message.role }}
{{ message.content }}{{ message.get('tools', []) | tojson }}<turn|>
    {% endif %}
    {% if loop.index > 8 %}{% break %}{% endif %}
{% endfor %}
"""

TRAINED = """\
{#- Marks the model's own text for training, and calls methods inside loops and blocks. -#}
{% block chat %}
{%- for message in messages %}
{%- set said = message.content.replace('b>', 'i>', 1) %}
{%- if message.role == 'assistant' %}
    {%- generation -%}
        {%- set said = said.split('<channel|>')[-1] -%}
        {{- '{0}{1:>4}'.format(said, loop.index) -}}
    {%- endgeneration %}
{%- endif %}
{{ '%s: %s' % (message.role, said.replace('l', 'L')) }}
{%- endfor %}
{{- bos_token.replace('b', 'B') }}
{% generation %}{% endgeneration %}
{% endblock %}
"""

GEMMA_4 = """\
{#- Tools, thoughts, parts, null content, results by their call's id: the forms that Gemma 4's own templates know. -#}
{%- macro value_of(value) -%}
{%- if value is none -%}null
{%- elif value is string -%}<|"|>{{ value }}<|"|>
{%- elif value is boolean -%}{{ 'true' if value else 'false' }}
{%- elif value is mapping -%}{{ fields_of(value) }}
{%- elif value is sequence -%}[{% for item in value %}{{ value_of(item) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else -%}{{ value }}
{%- endif -%}
{%- endmacro -%}
{%- macro fields_of(fields) -%}
{ {%- for key, value in fields | dictsort -%}
{{ key }}:{{ value_of(value) }}{{ ',' if not loop.last }}
{%- endfor -%} }
{%- endmacro -%}
{%- macro said(content) -%}
{%- if content is string -%}{{ content | trim }}
{%- elif content is sequence and content is not mapping -%}
{%- for part in content if part.type == 'text' %}{{ part.text | trim }}{% endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set state = namespace(open=false, answered=false, asked=-1) -%}
{%- set leading = messages[0].role in ('system', 'developer') -%}
{%- for message in messages if message.role == 'user' -%}{%- set state.asked = state.asked + 1 -%}{%- endfor -%}
{{- bos_token -}}
{%- if leading or tools or enable_thinking | default(false) -%}
{{- '<|turn>system\\n' -}}
{{- '<|think|>\\n' if enable_thinking | default(false) -}}
{{- said(messages[0].content) if leading -}}
{%- for tool in tools or [] -%}
{{- '<|tool>declaration:' ~ tool.function.name ~ fields_of(tool.function.parameters or {}) ~ '<tool|>' -}}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- set turns = namespace(user=-1) -%}
{%- for message in (messages[1:] if leading else messages) -%}
{%- if message.role == 'tool' -%}
{%- set found = namespace(name=message.name or 'unknown') -%}
{%- for other in messages -%}
{%- for call in other.tool_calls or [] if call.id == message.tool_call_id -%}
{%- set found.name = call.function.name -%}
{%- endfor -%}
{%- endfor -%}
{{- '<|tool_response>response:' ~ found.name ~ fields_of({'value': said(message.content)}) ~ '<tool_response|>' -}}
{%- set state.answered = true -%}
{%- else -%}
{%- if message.role == 'user' -%}{%- set turns.user = turns.user + 1 -%}{%- endif -%}
{%- if not (message.role == 'assistant' and state.open) -%}
{{- '<|turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' -}}
{%- endif -%}
{%- if message.reasoning_content and (turns.user == state.asked or preserve_thinking) -%}
{{- '<|channel>thought\\n' ~ message.reasoning_content ~ '\\n<channel|>' -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if call.function.arguments is string -%}{{ raise_exception('arguments must be a mapping') }}{%- endif -%}
{{- '<|tool_call>call:' ~ call.function.name ~ fields_of(call.function.arguments or {}) ~ '<tool_call|>' -}}
{%- endfor -%}
{{- said(message.content) -}}
{%- set state.open = message.tool_calls is defined and message.tool_calls -%}
{{- '<turn|>\\n' if not state.open -}}
{%- set state.answered = false -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if not state.answered -%}{{- '<|turn>model\\n' -}}
{%- elif enable_thinking | default(false) -%}{{- '<|channel>thought\\n' -}}
{%- endif -%}
{%- endif -%}
"""

GEMMA_4_SEEING = GEMMA_4.replace(
    "{%- for part in content if part.type == 'text' %}{{ part.text | trim }}{% endfor -%}",
    "{%- for part in content %}{{ '<|' ~ part.type ~ '|>' if part.type != 'text' else part.text | trim }}{% endfor -%}",
)
"""With pictures and sounds, also in the results of tools, where Gemma 4's own templates leave them out."""
GEMMA_4_LARGE = GEMMA_4.replace(
    "{{- '<|turn>model\\n' -}}",
    "{{- '<|turn>model\\n' -}}{{- '<|channel>thought\\n<channel|>' if not enable_thinking | default(false) -}}",
)
"""As the larger models' templates: where the model shall not think, its empty thought is written for it."""

GEMMA_4_PLAIN_SYSTEM = GEMMA_4.replace("said(messages[0].content) if leading", "messages[0].content | trim if leading")
"""As Google's own: it reads the parts of all messages but the system's."""

DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|User|>' + message.content }}{% endif %}
{%- if message.role == 'assistant' and message.content is none %}
{%- for call in message.tool_calls %}
{{- '<|call|>' + call.type + '<|sep|>' + call.function.name + '\\n' + call.function.arguments + '<|end|>' }}
{%- endfor %}
{%- elif message.role == 'assistant' %}{{ '<|Assistant|>' + message.content }}
{%- elif message.role == 'tool' %}{{ '<|output|>' + message.content }}
{%- endif %}
{%- endfor %}
"""
"""In the style of DeepSeek R1's: calls are written where there is no content, and their arguments are a text."""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception("ids of calls have 9 letters or digits") }}
            {%- endif %}
            {%- set function = call.function | tojson %}
            {{- function[:-1] + ', "id": "' + call.id + '"}' + (", " if not loop.last else "") }}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message.role == "tool" %}
        {%- if message.tool_call_id | length != 9 %}
            {{- raise_exception("ids of calls have 9 letters or digits") }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- "[/TOOL_RESULTS]" }}
    {%- elif message.role == "user" %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- else %}
        {{- " " + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
"""As of Mistral's tokenizers of version 3, which take ids of nine letters or digits only."""

GPT_OSS = (Path(__file__).parent / "gpt_oss.jinja").read_text("utf-8")
"""gpt-oss's, whose source and licence its first lines name."""

LFM_2 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if loop.first and tools %}
        {{- 'List of tools: <|tool_list_start|>' + tools | tojson + '<|tool_list_end|>\\n' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_call_start|>[' if loop.first else ', ' }}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
        {{- ']<|tool_call_end|>' if loop.last }}
    {%- endfor %}
    {%- if message.role == 'tool' %}
        {{- '<|tool_response_start|>' + message.content + '<|tool_response_end|>' }}
    {%- else %}
        {{- message.content or '' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""
"""Writes the format of LFM2's: earlier calls as JSON."""

LFM_25 = """\
{%- macro said(content) %}
    {%- if content is string %}{{ content }}
    {%- else %}{% for part in content %}{{ part.text }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- macro argument(name, value) %}
    {{- name + '=' }}
    {%- if value is string %}{{ "'" + value + "'" }}
    {%- else %}{{ value | tojson if value is mapping else value | string }}
    {%- endif %}
{%- endmacro %}
{%- set asked = namespace(last=-1) %}
{%- for message in messages if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endfor %}
{{- bos_token }}
{%- if tools %}{{ '<|im_start|>system\\nList of tools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- set turn = namespace(user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set turn.user = turn.user + 1 %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}
    {%- if message.role == 'assistant' and message.thinking is defined and turn.user == asked.last %}
        {{- '<think>' + message.thinking + '</think>' }}
    {%- endif %}
    {{- said(message.content) }}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_call_start|>[' if loop.first else ', ' }}
        {{- call.function.name + '(' }}
        {%- for name, value in call.function.arguments.items() %}
            {{- argument(name, value) + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ')' + (']<|tool_call_end|>' if loop.last else '') }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {%- endgeneration %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""
"""Writes the format of LFM2.5's: earlier calls as in Python, with texts between quotes as they are."""

QWEN_TAGGED = """\
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- if not asked %}{{ raise_exception('nobody asks anything') }}{% endif %}
{%- macro said(content) %}
    {%- if content is string %}{{ content | trim }}
    {%- elif content is not none %}{% for part in content %}{{ part.text }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' + tools | tojson + '</tools>\\n' }}
    {{- 'Call them so:\\n<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n' }}
    {{- '</parameter>\\n</function>\\n</tool_call>' }}
    {{- '\\n' + said(messages[0].content) if messages[0].role == 'system' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('a system message comes first') }}{% endif %}
        {{- '<|im_start|>system\\n' + said(message.content) + '<|im_end|>\\n' if not tools }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + said(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {{- said(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if not loop.first else '\\n\\n' if said(message.content) else '' }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments.items() %}
                {%- set plain = value is string or value is number or value is none %}
                {%- set text = value | string if plain else value | tojson %}
                {{- '<parameter=' + name + '>\\n' + text + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + said(message.content) + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- else %}
        {{- raise_exception('nobody has such a role') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' + ('\\n</think>\\n\\n' if enable_thinking is false else '') }}
{%- endif %}
"""
"""Writes the format of Qwen3.5's: calls between tags, and a prompt that begins the thoughts, or writes empty ones."""

SEED_OSS = """\
{%- set bos_token = '<seed:bos>' %}
{%- set eos_token = '<seed:eos>' %}
{%- if messages[0].role == 'system' or tools %}
    {{- bos_token + 'system\\n' + (messages[0].content if messages[0].role == 'system' else 'Call functions.') }}
    {%- for tool in tools or [] %}
        {{- '\\ndef ' + tool.function.name + '(' }}
        {%- for name, schema in tool.function.parameters.properties.items() %}{{ name + ', ' }}{% endfor %}
        {{- '): ' + tool.function.description | trim }}
    {%- endfor %}
    {{- eos_token }}
{%- endif %}
{%- if thinking_budget is defined and thinking_budget == 0 %}
    {{- bos_token + 'system\\nAnswer without thoughts.' + eos_token }}
{%- endif %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
    {{- bos_token + message.role }}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {{- '\\n<seed:think>' + message.reasoning_content | trim + '</seed:think>' }}
    {%- endif %}
    {{- '\\n' + message.content if message.content is string and message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>' + value | string + '</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</seed:tool_call>' }}
    {%- endfor %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- bos_token + 'assistant\\n' }}
    {{- '<seed:think><seed:cot_budget_reflect>' if thinking_budget is defined and thinking_budget == 0 }}
{%- endif %}
"""
"""Writes the format of Seed-OSS's: values of calls as Python prints them."""

EXAONE_4 = """\
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('unknown') }}{% endif %}
    {%- if loop.first and tools and message.role != 'system' %}
        {{- '[|system|]\\n' + tools | tojson + '[|endofturn|]\\n' }}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- '[|tool|]\\n' if loop.previtem.role != 'tool' }}
        {{- '<tool_result>{"result": ' + message.content | tojson(ensure_ascii=False) + '}</tool_result>' }}
        {{- '[|endofturn|]\\n' if loop.last or loop.nextitem.role != 'tool' else '\\n' }}
    {%- else %}
        {{- '[|' + message.role + '|]\\n' }}
        {%- if message.role == 'assistant' %}
            {{- '<think>\\n' + (message.reasoning_content or '' if loop.last else '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson(ensure_ascii=False) + '}</tool_call>' }}
        {%- endfor %}
        {{- '\\n\\n' + tools | tojson if message.role == 'system' and loop.first and tools }}
        {{- '[|endofturn|]\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[|assistant|]\\n<think>\\n' + ('' if enable_thinking is true else '\\n</think>\\n\\n') }}
{%- endif %}
"""

GRANITE_4 = """\
{%- macro said(content) %}
    {%- if content is string %}{{ content }}
    {%- else %}{% for part in content or [] %}{{ part.text }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{{- '<|start_of_role|>system<|end_of_role|>' + (said(messages[0].content) if messages[0].role == 'system' else '') }}
{%- if tools %}
    {{- '<tools>' + tools | tojson + '</tools>\\nCall them so:\\n<tool_call>\\n{"name": NAME}\\n</tool_call>' }}
{%- endif %}
{{- '<|end_of_text|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + said(message.content) + '<|end_of_text|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_of_role|>assistant<|end_of_role|>' + said(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end_of_text|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_of_role|>user<|end_of_role|>' if loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + said(message.content) + '\\n</tool_response>' }}
        {{- '<|end_of_text|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{{- '<|start_of_role|>assistant<|end_of_role|>' if add_generation_prompt }}
"""

GRANITE_33 = """\
{%- if messages[0].role == 'system' %}
    {%- set system, asked = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, asked = 'You are Granite.', messages %}
    {%- if tools %}{% set system = system + ' Respond only with <|tool_call|> followed by a JSON list of tools used.' %}
    {%- elif thinking %}
        {%- set system = system + ' Write thoughts in <think></think> and answers in <response></response>.' %}
    {%- endif %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in asked %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_of_role|>assistant' + (' ' + controls | tojson if controls else '') + '<|end_of_role|>' }}
{%- endif %}
"""
GRANITE_32 = GRANITE_33.replace(
    "thoughts in <think></think> and answers in <response></response>",
    "thoughts after Here is my thought process: and answers after Here is my response:",
)

GRANITE_30 = """\
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>\\n' + tools | tojson + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant_tool_call' %}
        {{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + message.content + '<|end_of_text|>\\n' }}
    {%- elif message.role in ('system', 'user', 'assistant', 'tool_response') %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|start_of_role|>assistant<|end_of_role|>' if add_generation_prompt }}
"""

GLM_4 = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\\n# Functions' }}
    {%- for tool in tools %}{{ '\\n\\n## ' + tool.function.name + '\\n\\n' + tool.function | tojson }}{% endfor %}
{%- endif %}
{%- for message in messages if message.role == 'system' %}{{ '<|system|>\\n' + message.content }}{% endfor %}
{%- for message in messages if message.role != 'system' %}
    {%- set said, meta = message.content.split('</think>')[-1].strip(), message.get('metadata', '') %}
    {%- if message.role == 'user' %}{{ '<|user|>\\n' + said }}
    {%- elif message.role == 'assistant' %}{{ '<|assistant|>' + meta + '\\n' + said }}
    {%- elif message.role == 'observation' %}{{ '<|observation|>\\n' + said }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}
"""
GLM_Z1 = GLM_4.replace("{{- '<|assistant|>' if", "{{- '<|assistant|>\\n<think>' if")
"""A call is a message of the assistant with `metadata`, a result one of the role `observation`."""
