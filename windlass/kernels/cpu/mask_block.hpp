// Which slots a query sees.
// Included inside the namespace of one instruction set, after simd.hpp.

constexpr float HIDDEN = -INFINITY;

// Which of a block's slots each query sees, and how.
struct BlockMask {
    float bias[MAX_TOKENS][BLOCK];  // 0, or -inf where hidden
    std::int32_t is_far[MAX_TOKENS][BLOCK];
    bool is_seen[BLOCK / LANES], has_near[BLOCK / LANES], has_far[BLOCK / LANES];
    bool is_empty;
    bool is_open[MAX_TOKENS];  // the query sees every slot of the block
};

// Whether logits of slots that a query sees all count as they are.
inline bool is_bias_unread(const Attend &call) { return !call.log_counts && call.softcap == 0; }

// Whether all slots of a block, whose positions are from `oldest` to `newest`, are seen by all queries, as near.
inline bool is_open_to_all(const Attend &call, int row, std::int32_t oldest, std::int32_t newest) {
    if (oldest < 0 || call.has_far()) return false;
    for (int t = 0; t < call.tokens; ++t) {
        const std::int32_t query = std::int32_t(call.query_positions[std::int64_t(row) * call.row_tokens + t]), most = query - oldest;
        if (query < newest || most >= call.sliding_window || most >= call.reach || query - query % call.attention_chunk > oldest) return false;
    }
    return true;
}

void mask_block(const Attend &call, int row, int score_head, int start, int count, BlockMask &mask) {
    const std::int32_t *slots =
        call.slot_positions + (std::int64_t(row) * call.score_heads + score_head) * call.slots + start;
    std::int32_t positions[BLOCK], newest = -1, oldest = INT32_MAX;
    for (int j = 0; j < BLOCK; ++j) {
        positions[j] = j < count ? slots[j] : -1;
        newest = positions[j] > newest ? positions[j] : newest, oldest = positions[j] < oldest ? positions[j] : oldest;
    }
    mask.is_empty = newest < 0;
    if (mask.is_empty) return;
    if (is_open_to_all(call, row, oldest, newest)) {
        for (int part = 0; part < BLOCK / LANES; ++part) mask.is_seen[part] = mask.has_near[part] = true, mask.has_far[part] = false;
        for (int t = 0; t < call.tokens; ++t) {
            mask.is_open[t] = true;
            for (int j = 0; j < BLOCK && !is_bias_unread(call); ++j) mask.bias[t][j] = 0, mask.is_far[t][j] = 0;
        }
        return;
    }
    std::int32_t seen[BLOCK] = {}, near[BLOCK] = {}, far[BLOCK] = {};
    const std::int32_t near_window = call.has_far() ? call.near_window : INT32_MAX;
    for (int t = 0; t < call.tokens; ++t) {
        std::int32_t are_visible = -1;
        const std::int32_t query = std::int32_t(call.query_positions[std::int64_t(row) * call.row_tokens + t]);
        const std::int32_t chunk_start = query - query % call.attention_chunk;
        for (int j = 0; j < BLOCK; ++j) {
            const std::int32_t distance = query - positions[j];
            const std::int32_t is_visible = (positions[j] >= 0) & (distance >= 0) &
                                            (distance < call.sliding_window) &
                                            (positions[j] >= chunk_start) &
                                            ((distance < call.reach) | (positions[j] < call.sinks));
            const std::int32_t is_far = distance >= near_window;
            mask.bias[t][j] = is_visible ? 0.0f : HIDDEN;
            mask.is_far[t][j] = is_far ? -1 : 0;
            seen[j] |= is_visible, are_visible &= -is_visible;
            near[j] |= is_visible & ~is_far;
            far[j] |= is_visible & is_far;
        }
        mask.is_open[t] = are_visible != 0;
    }
    mask.is_empty = true;
    for (int part = 0; part < BLOCK / LANES; ++part) {
        std::int32_t any = 0, any_near = 0, any_far = 0;
        for (int j = part * LANES; j < (part + 1) * LANES; ++j)
            any |= seen[j], any_near |= near[j], any_far |= far[j];
        mask.is_seen[part] = any != 0;
        mask.has_near[part] = (any_near & 1) != 0;
        mask.has_far[part] = any_far != 0;
        mask.is_empty &= any == 0;
    }
}
