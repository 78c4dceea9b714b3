"""Chat templates in the style of Gemma's."""

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
