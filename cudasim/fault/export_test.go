package fault

import "github.com/purecuda/purecuda/internal/cuapi"

// Matches tells whether the first call matches.
func Matches(c Cond, id cuapi.ID) bool { return c.matches(id, 1) }

// Exactly is how Each names an entry point.
func Exactly(id cuapi.ID) Cond { return exactly(id) }
