"""A little text of our own, so that the quick bench runs without any data."""

SAMPLE = """\
The harbour wakes before the town does. At four in the morning the first lamps move along the quay, and the
men who carry them speak low, as if the water could hear. Ice is shovelled into wooden boxes. Somebody tests
an engine, lets it cough, and stops it again. By five the boats are gone, one behind the other, past the
breakwater and the green light at its end, and the gulls that followed them come back one by one.

Maren kept the books of the fish market for thirty-one years. Each crate had a number, each number a line,
and each line a boat, a weight and a price. She wrote with a pencil, because ink runs when it gets wet, and
everything in the market gets wet. When the office bought its first computer, she asked what it would do on
the day the power failed. Nobody knew. On that day, the third of November, the auction was held by the light
of two car headlamps, and the only list of what had been sold to whom was hers.

A tide table looks like arithmetic, and for the most part it is. The moon pulls, the sun pulls a little less,
and the shape of the coast decides what becomes of it. Twice a day the water rises by about three metres at
the pier and by almost five at the head of the bay, where the shore narrows and the flood has nowhere else to
go. But wind is not in the table. A storm from the west can hold the water in the bay for half a day, and a
week of high pressure can press it down by the width of a hand. So the pilots read the table first, then the
barometer, and then they look out of the window.

How do you measure the length of a coast? With a long ruler you cut across every cove, with a short one you
follow it in and out again, and the shorter the ruler, the longer the coast. The surveyors of the old map
walked with a chain of twenty metres and found 212 kilometres. The new map, made from the air, says 340. Both
are right, and neither is of use to somebody who wants to know how long the walk takes: two days and a half
in dry weather, three in wet, with a night at the lighthouse and another at the farm above the white cliffs.

The lighthouse itself is younger than it looks. The tower that stands today was finished in 1887, on the
foundation of an older one that burned coal in an iron basket. Its lens floated in a bath of mercury and could
be turned with one finger. A clockwork driven by a falling weight did the turning, and the keeper wound it up
every four hours, so that he never slept longer than that in all his years. Now a motor of the size of a
coffee cup turns the light, and a small panel on the gallery makes its electricity from the sun.

Recipe for the soup that the canteen serves on Fridays, for forty people. Peel six kilograms of potatoes and
cut them small. Wash ten leeks, slice them, and let them go soft in half a kilogram of butter. Add the
potatoes, eight litres of fish stock, twelve bay leaves and two spoons of salt, and cook for twenty minutes.
Cut four kilograms of smoked haddock into pieces, take out the bones, and put it in with three litres of milk.
Heat it until it steams, but never let it boil. Parsley on top, bread beside it.

Questions that visitors ask most often, with the answers of the harbour office. When does the ferry leave?
At seven, at eleven, at three and at six; on Sundays not at seven. May I take a dog? Yes, on a lead. Can I see
seals? Often, on the sandbank, two hours before and after low water. Where can I buy fish? In the hall behind
the crane, from six to ten, and after that from the shop in Rope Street, which buys it in the same hall. Is
the water cold? It is never warmer than seventeen degrees, and nobody who grew up here calls that cold.
"""
