// What the benchmark needs of a llama.cpp that was built from source, as plain functions: its own headers know the
// layout of its records, which changes between versions. native_llama_worker.py compiles this and calls it.
#include <llama.h>
#include <vector>

extern "C" {

void *peer_model(const char *path) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model_params settings = llama_model_default_params();
    settings.load_mode = LLAMA_LOAD_MODE_NONE;  // pages of a mapped file may be dropped while others work
    return llama_model_load_from_file(path, settings);
}

void *peer_context(void *model, unsigned room, unsigned chunk, int threads, int cache_type, int flash, int sequences) {
    llama_context_params settings = llama_context_default_params();
    settings.n_ctx = room;
    settings.n_ubatch = chunk;
    settings.n_seq_max = sequences;
    settings.kv_unified = true;  // all sequences in one memory, as a single one is in any case
    settings.n_threads = settings.n_threads_batch = threads;
    settings.type_k = settings.type_v = static_cast<ggml_type>(cache_type);
    settings.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    return llama_init_from_model(static_cast<llama_model *>(model), settings);
}

void peer_free(void *context) { llama_free(static_cast<llama_context *>(context)); }

int peer_feed(void *context, llama_token *ids, int count) {
    llama_context *used = static_cast<llama_context *>(context);
    int status = llama_decode(used, llama_batch_get_one(ids, count));
    llama_synchronize(used);
    return status;
}

int peer_go_back(void *context, int depth) {
    return llama_memory_seq_rm(llama_get_memory(static_cast<llama_context *>(context)), 0, depth, -1);
}

// Copy the tokens of the first sequence of one context into sequence `to` of another, or of the same.
int peer_copy(void *from, void *target, int to) {
    llama_context *source = static_cast<llama_context *>(from);
    std::vector<uint8_t> state(llama_state_seq_get_size(source, 0));
    size_t written = llama_state_seq_get_data(source, state.data(), state.size(), 0);
    return llama_state_seq_set_data(static_cast<llama_context *>(target), state.data(), written, to) > 0;
}

// Let the first `tokens` tokens of the first sequence follow themselves, with the keys and values that they have.
int peer_double(void *context, int tokens) {
    if (!peer_copy(context, context, 1)) return 0;
    llama_memory_t memory = llama_get_memory(static_cast<llama_context *>(context));
    llama_memory_seq_add(memory, 1, 0, -1, tokens);
    llama_memory_seq_cp(memory, 1, 0, -1, -1);
    return llama_memory_seq_rm(memory, 1, -1, -1);
}

const float *peer_logits(void *context) { return llama_get_logits_ith(static_cast<llama_context *>(context), -1); }

unsigned peer_quantize(const char *source, const char *target, int threads) {
    llama_model_quantize_params settings = llama_model_quantize_default_params();
    settings.ftype = LLAMA_FTYPE_MOSTLY_Q4_0;
    settings.nthread = threads;
    settings.allow_requantize = true;  // it is to take bfloat16
    return llama_model_quantize(source, target, &settings);
}
}
