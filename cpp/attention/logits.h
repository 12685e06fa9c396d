// From q.k to the logit: logits = soft_cap(scale * q.k) + bias.
#pragma once

#include "attention/config.h"

namespace jaxflash {

// A logit after scale and cap, before bias, with the slope of the cap there. `tanh_of` is the tanh
// of the scalar or vector type V.
template <class V>
struct CappedLogit {
  V value;
  V slope;
};

template <class V, class Scalar, class Tanh>
JAXFLASH_INLINE CappedLogit<V> soft_capped(V scaled, Scalar cap, Tanh tanh_of) {
  const V t = tanh_of(scaled / cap);
  return {t * cap, Scalar(1) - t * t};
}

}  // namespace jaxflash
