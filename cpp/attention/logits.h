// From q.k to the logit: logits = soft_cap(scale * q.k) + bias, then minus infinity where hidden. A
// bias of minus infinity hides as well, whatever the logit.
#pragma once

#include "attention/config.h"

namespace jaxflash {

// A logit after scale and cap, before bias, in units of the cap; with the slope of the cap there.
template <class V>
struct CappedLogit {
  V in_caps;
  V slope;
};

// `tanh_of` takes `scaled` to the tanh of the scaled logit in units of the cap.
template <class V, class Tanh>
JAXFLASH_INLINE CappedLogit<V> soft_capped(V scaled, Tanh tanh_of) {
  const V t = tanh_of(scaled);
  return {t, 1 - t * t};
}

}  // namespace jaxflash
