"""HTTP for many clients at once, as OpenAI's API has it. Needs the extra `serve`. Only `cli` imports this room."""
