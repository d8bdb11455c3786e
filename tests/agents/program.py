"""An agent as a program of its own, with Python's standard library only. Its reward depends on its first argument."""

import json
import os
import sys
import time
import urllib.request


def post(path: str, body: object) -> dict:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


row = json.load(sys.stdin)
messages = [{"role": "user", "content": row["prompt"]}]
answer = post("/chat/completions", {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 8})
text = answer["choices"][0]["message"]["content"]
match sys.argv[1]:
    case "prints":
        print("working")
        print(len(text))
    case "posts":
        post("/reward", {"reward": len(text), "label": row["label"] == "yes"})
    case "fails":
        sys.exit("no idea")
    case "hangs":
        time.sleep(600)
