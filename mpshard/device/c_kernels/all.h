// All kernels for one set of instructions: NAME, LANES, ROWS and COLUMNS say which, and are free again behind it.
#include "elementwise.h"
#include "attention.h"
#include "product.h"
#undef NAME
#undef LANES
#undef ROWS
#undef COLUMNS
