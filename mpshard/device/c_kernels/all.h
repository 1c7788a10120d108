// All kernels for one set of instructions: NAME, LANES, LARGER, ROWS and COLUMNS say which, and are free again behind it.
#include "vectors.h"
#include "elementwise.h"
#include "attention.h"
#include "product.h"
#include "again.h"
#undef vec
#undef ints
#undef LARGER
#undef NAME
#undef LANES
#undef ROWS
#undef COLUMNS
