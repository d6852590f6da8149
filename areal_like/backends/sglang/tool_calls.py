"""The first texts of tool calls, for the parsers of SGLang 0.5.17 that return the text before them as content."""

_XML = ("<tool_call>",)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>",)

CALL_STARTS = {
    **dict.fromkeys(("qwen", "qwen25", "qwen3_coder", "glm", "glm45", "glm47", "mimo"), _XML),
    **dict.fromkeys(("deepseekv3", "deepseekv31"), _DEEPSEEK),
    "mistral": ("[TOOL_CALLS",),
}
