"""Run under OpenVINO's environment: an HTTP server around GenAI, which has none of its own.

python openvino_server.py --target IR --draft IR|none --k 4 --port 8000

    GET /health                     {"status": "ok"}
    GET /v1/models                  names the alias, and "owned_by": "openvino"
    POST /completion                field names of llama.cpp's server; one request at a time, others wait
        prompt (list of ids, or text), n_predict, temperature (0: greedy), top_k, top_p, seed, ignore_eos, stream
        -> tokens, content, tokens_evaluated, timings {prompt_n, predicted_n, predicted_ms, draft_n_accepted, ...}
           and rounds: forwards of the target after prefill's
        stream: lines `data: {"tokens": [ids], "stop": false}`, as GenAI hands them over (sampled with a draft: all at
        once); the last one has the timings

Target and draft are converted folders; the draft's taps must stand in its openvino_model.xml (export/openvino.py).
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import openvino as ov
import openvino_genai as genai

MOST_BYTES = 64 << 20  # of a request


def arguments():
    options = argparse.ArgumentParser()
    options.add_argument("--target", required=True)
    options.add_argument("--draft", default="none")
    options.add_argument("--k", type=int, default=4)
    options.add_argument("--alias", default="target")
    options.add_argument("--precision", choices=["f32", "bf16", "default"], default="f32")
    options.add_argument("--context", type=int, default=1024)
    options.add_argument("--cache-size", type=int, default=1, help="GiB of keys and values")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, required=True)
    return options.parse_args()


class Refused(Exception):
    """A request that is answered with 400 and the reason."""


class Tokens(genai.StreamerBase):
    """Hands on the ids that a round brought; stops the generation when nobody reads them any more."""

    def __init__(self, send):
        super().__init__()
        self.send = send

    def write(self, token):
        ids = [int(i) for i in token] if isinstance(token, (list, tuple)) else [int(token)]
        return genai.StreamingStatus.RUNNING if self.send(ids) else genai.StreamingStatus.CANCEL

    def end(self):
        pass


class Model:
    """The pipeline, which one request has at a time."""

    def __init__(self, a):
        exact = {} if a.precision == "default" else {
            "INFERENCE_PRECISION_HINT": a.precision, "KV_CACHE_PRECISION": a.precision,
        }  # fmt: skip
        exact["INFERENCE_NUM_THREADS"] = a.threads
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = a.cache_size
        scheduler.enable_prefix_caching = False
        self.drafted = a.draft != "none"
        more = {"draft_model": genai.draft_model(a.draft, "CPU", **exact)} if self.drafted else {}
        self.pipe = genai.LLMPipeline(a.target, "CPU", scheduler_config=scheduler, **more, **exact)
        self.k, self.context, self.lock = a.k, a.context, threading.Lock()
        known = self.pipe.get_generation_config()
        ends = {*known.stop_token_ids, known.eos_token_id, self.pipe.get_tokenizer().get_eos_token_id()}
        self.ends = {i for i in ends if i >= 0}

    def ids(self, asked):
        prompt = asked.get("prompt")
        if isinstance(prompt, str):
            return [int(i) for i in self.pipe.get_tokenizer().encode(prompt).input_ids.data[0]]
        if isinstance(prompt, list) and prompt and all(type(i) is int and i >= 0 for i in prompt):
            return prompt
        raise Refused("prompt must be a text or a list of token ids")

    def config(self, asked, prompt):
        config = genai.GenerationConfig()
        room = self.context - len(prompt)
        wanted = int(asked.get("n_predict", -1))
        config.max_new_tokens = room if wanted < 0 else wanted
        if room < 1 or config.max_new_tokens > room:
            raise Refused(f"{len(prompt)} tokens and {wanted} more do not fit into a context of {self.context}")
        temperature = float(asked.get("temperature", 0.8))
        config.do_sample = temperature > 0
        if config.do_sample:
            config.temperature = temperature
            config.top_p = float(asked.get("top_p", 1.0))
            config.top_k = int(asked.get("top_k", 0)) or sys.maxsize
            config.rng_seed = int(asked.get("seed", 0))
        config.ignore_eos = bool(asked.get("ignore_eos", False))
        if not config.ignore_eos:
            config.stop_token_ids = self.ends
        if self.drafted:
            config.num_assistant_tokens = self.k
        return config

    def complete(self, asked, send):
        """The last object of an answer; `send(ids)` gets each round's ids before."""
        prompt = self.ids(asked)
        config = self.config(asked, prompt)
        tensor = ov.Tensor(np.array([prompt], dtype=np.int64))
        inputs = genai.TokenizedInputs(tensor, ov.Tensor(np.ones_like(tensor.data)))
        heard, at = [], []

        def hear(ids):
            heard.extend(ids)
            at.append(time.perf_counter())
            return send(ids)

        with self.lock:
            began = time.perf_counter()
            # With a draft GenAI hands over rounds of greedy decoding only (eagle3_strategy.cpp:369).
            rounds = [] if self.drafted and config.do_sample else [Tokens(hear)]
            said = self.pipe.generate(inputs, config, *rounds)
            ended = time.perf_counter()
        tokens = [int(i) for i in said.tokens[0]] if len(said.tokens) else heard
        if not rounds:
            send(tokens)
        timings = {"prompt_n": len(prompt), "predicted_n": len(tokens)}
        if at:
            timings |= {"prompt_ms": (at[0] - began) * 1e3, "predicted_ms": (ended - at[0]) * 1e3}
        answer = {"tokens": tokens, "stop": True, "tokens_evaluated": len(prompt), "tokens_predicted": len(tokens)}
        answer["stop_type"] = "limit" if len(tokens) >= config.max_new_tokens else "eos"
        if self.drafted and said.extended_perf_metrics is not None:
            metrics = said.extended_perf_metrics
            timings["draft_n_accepted"] = metrics.get_num_accepted_tokens()
            timings["draft_n"] = metrics.get_num_draft_tokens()
            answer["rounds"] = len(metrics.main_model_metrics.raw_metrics.m_durations) - 1  # the first is the prefill
        return {**answer, "timings": timings}


class Handler(BaseHTTPRequestHandler):
    model, alias = None, "target"

    def log_message(self, form, *words):
        sys.stderr.write(f"{self.command} {self.path} {words[1] if len(words) > 1 else ''}\n")

    def _json(self, code, value):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/health":
            self._json(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": self.alias, "object": "model", "owned_by": "openvino"}]})
        else:
            self._json(404, {"error": {"message": f"no page {self.path}; there are /health and /completion"}})

    def do_POST(self):
        if self.path != "/completion":
            self._json(404, {"error": {"message": f"no page {self.path}; POST to /completion"}})
            return
        try:
            asked = json.loads(self.rfile.read(min(int(self.headers.get("Content-Length", 0)), MOST_BYTES)))
            if not isinstance(asked, dict):
                raise Refused("the request must be a JSON object")
            self._stream(asked) if asked.get("stream") else self._whole(asked)
        except (Refused, ValueError, TypeError) as error:
            self._json(400, {"error": {"message": str(error)}})
        except (BrokenPipeError, ConnectionResetError):
            pass  # nobody waits for the answer any more
        except Exception as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            self._json(500, {"error": {"message": f"{type(error).__name__}: {error}"}})

    def _whole(self, asked):
        answer = self.model.complete(asked, lambda ids: True)
        answer["content"] = self._text(answer["tokens"])
        self._json(200, answer)

    def _stream(self, asked):
        gone = threading.Event()

        def send(value):
            try:
                self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
                self.wfile.flush()
            except OSError:
                gone.set()

        self.model.config(asked, self.model.ids(asked))  # what is refused is refused before the 200
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

        def part(ids):
            send({"tokens": ids, "content": self._text(ids), "stop": False})
            return not gone.is_set()

        try:
            last = self.model.complete(asked, part)
            last["tokens"] = []  # they were said
        except Exception as error:
            last = {"error": {"message": f"{type(error).__name__}: {error}"}, "stop": True}
        send(last)

    def _text(self, ids):
        try:
            return str(self.model.pipe.get_tokenizer().decode(ids))
        except Exception:  # a folder without a tokenizer: ids are all that there is
            return ""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main():
    a = arguments()
    server = Server((a.host, a.port), Handler, bind_and_activate=False)
    server.server_bind()  # before minutes of loading; nobody is answered until then
    Handler.model, Handler.alias = Model(a), a.alias
    server.server_activate()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: os._exit(0))  # GenAI's threads end with the process
    print(f"serving on http://{a.host}:{a.port}", flush=True)  # noqa: T201 - its log
    server.serve_forever()


if __name__ == "__main__":
    main()
