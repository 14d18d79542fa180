// The codecs of the core, as exchanges call them.
#pragma once

#include <utility>
#include <vector>

#include "embedded_float/codec.hpp"
#include "exchange/codec.hpp"
#include "gcomp/codec.hpp"
#include "gcomp/importance.hpp"
#include "quantisers/codec.hpp"
#include "truncated_float/codec.hpp"

namespace gradwire::exchange {

class GCompCodec final : public Codec {
 public:
  // `table`: to encode with. `known`: what messages may have been written with. `importance`: in mode paper. `counts`:
  // if not empty, the exponents of all that is encoded are counted into it.
  GCompCodec(const gcomp::EncodeOptions& options, const HuffmanTable& table, std::vector<const HuffmanTable*> known,
             const gcomp::BucketImportance* importance, std::span<std::int64_t> counts)
      : options_(options),
        table_(table),
        known_(std::move(known)),
        counts_(counts),
        weights_(options.mode == gcomp::Mode::paper ? importance : nullptr) {}
  std::size_t max_message_bytes(std::size_t n_values) const override {
    return gcomp::max_message_bytes(n_values, options_.dtype, options_.mode, options_.version);
  }
  bool weigh(std::size_t first, std::size_t n) override { return weights_.write(first, n); }
  std::size_t encode(const Values& values, std::size_t first, Bytes out) override {
    return encode(values, weights_.at(first, values.n), gcomp::Mean{}, out);
  }
  std::size_t encode_mean(const Values& values, std::size_t first, std::size_t divisor, const Values& mean,
                          Bytes out) override {
    return encode(values, weights_.at(first, values.n, true), gcomp::Mean{mean.data, static_cast<float>(divisor)}, out);
  }
  void decode(ConstBytes message, std::size_t first, const Values& values) override {
    decode(message, weights_.at(first, values.n), gcomp::Finish{}, values);
  }
  void decode_sum(ConstBytes message, std::size_t first, const Values& addend, const Values& values) override {
    decode(message, weights_.at(first, values.n), gcomp::Finish{addend.data, 1}, values);
  }
  void decode_mean(ConstBytes message, std::size_t first, std::size_t divisor, const Values& values) override {
    decode(message, weights_.at(first, values.n, true), gcomp::Finish{nullptr, static_cast<float>(divisor)}, values);
  }

 private:
  std::size_t encode(const Values& values, ConstBytes weights, const gcomp::Mean& mean, Bytes out) {
    if (!counts_.empty()) gcomp::count_exponents(values.bytes(), options_.dtype, options_.version, counts_);
    return gcomp::encode(values.bytes(), weights, options_, table_, out, mean);
  }
  void decode(ConstBytes message, ConstBytes weights, const gcomp::Finish& finish, const Values& values) {
    gcomp::decode(message, options_.dtype, gcomp::table_of(message, known_), weights, finish, values.bytes());
  }

  const gcomp::EncodeOptions options_;
  const HuffmanTable& table_;
  const std::vector<const HuffmanTable*> known_;
  const std::span<std::int64_t> counts_;
  gcomp::Weights weights_;
};

// One-bit, two-bit, ternary, QSGD, THC: error feedback, sums and means in the pass that encodes or decodes.
class QuantiserCodec final : public Codec {
 public:
  // Without error feedback, the n-th message draws by step `options.stream.step` + n.
  explicit QuantiserCodec(const quantisers::Options& options) : options_(options) {}
  std::size_t max_message_bytes(std::size_t n_values) const override {
    return quantisers::max_message_bytes(options_, n_values);
  }
  std::size_t encode(const Values& values, std::size_t, Bytes out) override {
    const std::size_t n_bytes = quantisers::encode(options_, {values.bytes(), values.dtype, {}}, {}, out);
    ++options_.stream.step;
    return n_bytes;
  }
  std::size_t encode_with_feedback(const Values& values, std::size_t, const Feedback& feedback, Bytes out) override {
    quantisers::Options drawing = options_;
    drawing.stream.step = feedback.draw;
    return quantisers::encode(drawing, {values.bytes(), values.dtype, feedback.residual}, feedback.left_out, out);
  }
  void decode(ConstBytes message, std::size_t, const Values& values) override { decode(message, values, {}); }
  void decode_mean(ConstBytes message, std::size_t, std::size_t divisor, const Values& values) override {
    decode(message, values, {.divisor = static_cast<float>(divisor)});
  }
  void decode_add(ConstBytes message, std::size_t, Floats total, Floats) override {
    decode(message, values_of(total), {.adds = true});
  }

 private:
  void decode(ConstBytes message, const Values& values, const quantisers::Use& use) {
    quantisers::decode(message, options_.kind, values.dtype, values.bytes(), use);
  }

  quantisers::Options options_;
};

class TruncatedFloatCodec final : public Codec {
 public:
  // Stochastic rounding draws the n-th message's numbers by step `stream.step` + n.
  TruncatedFloatCodec(const truncated_float::Settings& settings, truncated_float::Rounding rounding,
                      const random::Stream& stream)
      : settings_(settings), rounding_(rounding), stream_(stream) {}
  std::size_t max_message_bytes(std::size_t n_values) const override {
    return truncated_float::max_message_bytes(n_values, settings_);
  }
  std::size_t encode(const Values& values, std::size_t, Bytes out) override {
    const std::size_t n_bytes = truncated_float::encode(values.bytes(), settings_, rounding_, stream_, out);
    ++stream_.step;
    return n_bytes;
  }
  void decode(ConstBytes message, std::size_t, const Values& values) override {
    truncated_float::decode(message, settings_.dtype, values.bytes());
  }

 private:
  const truncated_float::Settings settings_;
  const truncated_float::Rounding rounding_;
  random::Stream stream_;
};

class EmbeddedFloatCodec final : public Codec {
 public:
  EmbeddedFloatCodec(const embedded_float::Settings& settings, std::size_t n_bits, Dtype dtype)
      : settings_(settings), planes_{0, static_cast<int>(n_bits)}, dtype_(dtype) {}
  std::size_t max_message_bytes(std::size_t n_values) const override {
    return embedded_float::max_message_bytes(n_values, settings_.partition, planes_);
  }
  std::size_t encode(const Values& values, std::size_t, Bytes out) override {
    return embedded_float::encode(values.bytes(), dtype_, settings_, planes_, out);
  }
  void decode(ConstBytes message, std::size_t, const Values& values) override {
    embedded_float::decode(message, dtype_, values.bytes());
  }

 private:
  const embedded_float::Settings settings_;
  const planes::Range planes_;
  const Dtype dtype_;
};

}  // namespace gradwire::exchange
