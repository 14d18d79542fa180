#include "exchange/codecs.hpp"

#include <string>

#include "embedded_float/codec.hpp"
#include "errors.hpp"

namespace gradwire::exchange {
namespace {

std::span<std::uint8_t> bytes_of(const Values& values) { return {values.data, values.n * values.element_bytes()}; }

}  // namespace

GCompCodec::GCompCodec(const gcomp::EncodeOptions& options, const HuffmanTable& table,
                       std::vector<const HuffmanTable*> known, const gcomp::BucketImportance* importance,
                       std::span<std::int64_t> counts)
    : options_(options),
      table_(table),
      known_(std::move(known)),
      counts_(counts),
      weights_(options.mode == gcomp::Mode::paper ? importance : nullptr) {
  if (options.mode == gcomp::Mode::paper && importance == nullptr)
    throw InvalidArgument("GComp's levels are chosen by importance bytes, and there are none");
}

std::size_t GCompCodec::max_message_bytes(std::size_t n_values) const {
  return gcomp::max_message_bytes(n_values, options_.dtype, options_.mode, options_.version);
}

bool GCompCodec::weigh(std::size_t first, std::size_t n) { return weights_.write(first, n); }

std::size_t GCompCodec::encode(const Values& values, std::size_t first, const gcomp::Mean& mean,
                               std::span<std::uint8_t> out) {
  if (!counts_.empty()) gcomp::count_exponents(bytes_of(values), options_.dtype, options_.version, counts_);
  return gcomp::encode(bytes_of(values), weights_.at(first, values.n), options_, table_, out, mean);
}

std::size_t GCompCodec::encode(const Values& values, std::size_t first, std::span<std::uint8_t> out) {
  return encode(values, first, gcomp::Mean{}, out);
}

std::size_t GCompCodec::encode_mean(const Values& values, std::size_t first, std::size_t divisor, const Values& mean,
                                    std::span<std::uint8_t> out) {
  return encode(values, first, gcomp::Mean{mean.data, static_cast<float>(divisor)}, out);
}

void GCompCodec::decode(std::span<const std::uint8_t> message, std::size_t first, const gcomp::Finish& finish,
                        const Values& values) {
  const std::uint64_t id = gcomp::read_block_header(message).table_id;
  for (const HuffmanTable* table : known_)
    if (table->id() == id)
      return gcomp::decode(message, options_.dtype, *table, weights_.at(first, values.n), finish, bytes_of(values));
  throw CorruptMessage(
      "the message was written with Huffman table " + std::to_string(id) +
      ", which is not known here. Every rank has to add_table() a new table before any rank may use it");
}

void GCompCodec::decode(std::span<const std::uint8_t> message, std::size_t first, const Values& values) {
  decode(message, first, gcomp::Finish{}, values);
}

void GCompCodec::decode_sum(std::span<const std::uint8_t> message, std::size_t first, const Values& addend,
                            const Values& values) {
  decode(message, first, gcomp::Finish{addend.data, 1}, values);
}

void GCompCodec::decode_mean(std::span<const std::uint8_t> message, std::size_t first, std::size_t divisor,
                             const Values& values) {
  decode(message, first, gcomp::Finish{nullptr, static_cast<float>(divisor)}, values);
}

std::size_t QuantiserCodec::max_message_bytes(std::size_t n_values) const {
  return quantisers::max_message_bytes(options_, n_values);
}

std::size_t QuantiserCodec::encode(const Values& values, std::size_t, std::span<std::uint8_t> out) {
  const std::size_t n_bytes = quantisers::encode(options_, {bytes_of(values), values.dtype, {}}, {}, out);
  ++options_.stream.step;
  return n_bytes;
}

std::size_t QuantiserCodec::encode_with_feedback(const Values& values, std::size_t, const Feedback& feedback,
                                                 std::span<std::uint8_t> out) {
  quantisers::Options drawing = options_;
  drawing.stream.step = feedback.draw;
  return quantisers::encode(drawing, {bytes_of(values), values.dtype, feedback.residual}, feedback.left_out, out);
}

void QuantiserCodec::decode(std::span<const std::uint8_t> message, std::size_t, const Values& values) {
  quantisers::decode(message, options_.kind, values.dtype, bytes_of(values));
}

void QuantiserCodec::decode_mean(std::span<const std::uint8_t> message, std::size_t, std::size_t divisor,
                                 const Values& values) {
  quantisers::decode(message, options_.kind, values.dtype, bytes_of(values), {.divisor = static_cast<float>(divisor)});
}

void QuantiserCodec::decode_add(std::span<const std::uint8_t> message, std::size_t, std::span<float> total,
                                std::span<float>) {
  const Values values = values_of(total);
  quantisers::decode(message, options_.kind, values.dtype, bytes_of(values), {.adds = true});
}

std::size_t TruncatedFloatCodec::max_message_bytes(std::size_t n_values) const {
  return truncated_float::max_message_bytes(n_values, settings_);
}

std::size_t TruncatedFloatCodec::encode(const Values& values, std::size_t, std::span<std::uint8_t> out) {
  const std::size_t n_bytes = truncated_float::encode(bytes_of(values), settings_, rounding_, stream_, out);
  ++stream_.step;
  return n_bytes;
}

void TruncatedFloatCodec::decode(std::span<const std::uint8_t> message, std::size_t, const Values& values) {
  truncated_float::decode(message, settings_.dtype, bytes_of(values));
}

std::size_t EmbeddedFloatCodec::max_message_bytes(std::size_t n_values) const {
  return embedded_float::max_message_bytes(n_values, partition_, {0, static_cast<int>(n_bits_)});
}

std::size_t EmbeddedFloatCodec::encode(const Values& values, std::size_t, std::span<std::uint8_t> out) {
  return embedded_float::encode(bytes_of(values), dtype_, partition_, {0, static_cast<int>(n_bits_)}, out);
}

void EmbeddedFloatCodec::decode(std::span<const std::uint8_t> message, std::size_t, const Values& values) {
  embedded_float::decode(message, dtype_, bytes_of(values));
}

}  // namespace gradwire::exchange
