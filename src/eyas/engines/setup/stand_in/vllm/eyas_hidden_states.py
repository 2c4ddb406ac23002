"""vLLM's connector that writes a request's hidden states to a file, for a CPU.

The one that vLLM 0.32 ships copies them over a CUDA stream into pinned memory. Here they are in the processor's memory
already: they are gathered at once and written in the connector's own thread, with its own locks and files.

    --kv-transfer-config '{"kv_connector": "HiddenStatesOnCpu", "kv_connector_module_path": "eyas_hidden_states",
                           "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": "FOLDER"}}'
"""

import fcntl
import functools
import os

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class AlreadyCopied:
    """Stands for a CUDA event of a copy that is complete."""

    def synchronize(self):
        pass

    def query(self):
        return True


class HiddenStatesOnCpu(ExampleHiddenStatesConnector):
    """ExampleHiddenStatesConnector without streams and pinned memory."""

    def _submit_async_write(self, pending):
        if not self._is_tp_rank_zero:
            return
        blocks = torch.as_tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(
            self._kv_cache, slots, len(pending.token_ids)
        )  # a copy: it is indexed by a tensor
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        copied = AlreadyCopied()
        written = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
        self._req_copy_events[pending.req_id] = copied
        self._req_futures[pending.req_id] = written
        written.add_done_callback(functools.partial(self._on_write_done, pending.req_id))
