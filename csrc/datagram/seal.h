// Layer 1. Packets sealed by AES-128-GCM: nobody without the key reads or makes one.
//
// The nonce is the packet's number, which a sender never uses twice with a key: each direction
// between two ranks has a key of its own.
#pragma once

#include <openssl/evp.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "datagram/packet.h"

namespace loft::datagram {

class Cipher {
 public:
  static constexpr int kKeyBytes = 16;

  Cipher(const std::string& key, bool seals) : context_(EVP_CIPHER_CTX_new()), seals_(seals) {
    if (key.size() != kKeyBytes) throw std::invalid_argument("a key has 16 bytes");
    const auto* bytes = reinterpret_cast<const unsigned char*>(key.data());
    if (!context_ || !EVP_CipherInit_ex(context_.get(), EVP_aes_128_gcm(), nullptr, bytes, nullptr,
                                        seals ? 1 : 0)) {
      throw std::runtime_error("libcrypto has no AES-128-GCM");
    }
  }

  // Writes num_bytes of `body` sealed, and the tag, to `out`.
  bool seal(const Header& header, const void* body, int num_bytes, unsigned char* out) {
    int length = 0;
    return begin(header) && update(out, &length, body, num_bytes) &&
           EVP_CipherFinal_ex(context_.get(), out + num_bytes, &length) &&
           EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_GET_TAG, kTagBytes, out + num_bytes);
  }

  // Writes what was sealed in num_bytes, without its tag behind them, to `out`; false, and `out` is
  // not to be used, where it was not sealed with this key and header.
  bool open(const Header& header, const unsigned char* body, int num_bytes, unsigned char* out) {
    unsigned char tag[kTagBytes];
    std::memcpy(tag, body + num_bytes, kTagBytes);
    int length = 0;
    return begin(header) && update(out, &length, body, num_bytes) &&
           EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_SET_TAG, kTagBytes, tag) &&
           EVP_CipherFinal_ex(context_.get(), out + num_bytes, &length) > 0;
  }

 private:
  bool begin(const Header& header) {
    unsigned char nonce[12] = {};
    std::memcpy(nonce + 4, &header.number, sizeof header.number);
    int length = 0;
    return EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce, seals_ ? 1 : 0) &&
           EVP_CipherUpdate(context_.get(), nullptr, &length,
                            reinterpret_cast<const unsigned char*>(&header), kHeaderBytes);
  }

  bool update(unsigned char* out, int* length, const void* body, int num_bytes) {
    // A call without bytes would be taken for one about the header.
    return num_bytes == 0 || EVP_CipherUpdate(context_.get(), out, length,
                                              static_cast<const unsigned char*>(body), num_bytes);
  }

  struct Free {
    void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
  };
  std::unique_ptr<EVP_CIPHER_CTX, Free> context_;
  bool seals_;
};

}  // namespace loft::datagram
