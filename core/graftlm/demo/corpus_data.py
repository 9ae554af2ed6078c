"""Tables of the facts in the demo corpus."""

from typing import Final


def _pairs(table: str) -> dict[str, str]:
    """Parse `key: value` entries that are separated by commas."""
    rows = (row.split(":") for row in table.replace("\n", " ").split(","))
    return {key.strip(): value.strip() for key, value in rows}


def _words(text: str) -> tuple[str, ...]:
    """Parse words that are separated by spaces."""
    return tuple(text.split())


CAPITALS: Final = _pairs(
    """
    Albania: Tirana, Algeria: Algiers, Angola: Luanda, Argentina: Buenos Aires, Armenia: Yerevan, Australia: Canberra,
    Austria: Vienna, Azerbaijan: Baku, Bahrain: Manama, Bangladesh: Dhaka, Belarus: Minsk, Belgium: Brussels,
    Belize: Belmopan, Bhutan: Thimphu, Botswana: Gaborone, Brazil: Brasilia, Bulgaria: Sofia, Cambodia: Phnom Penh,
    Cameroon: Yaounde, Canada: Ottawa, Chad: Ndjamena, Chile: Santiago, China: Beijing, Colombia: Bogota,
    Croatia: Zagreb, Cuba: Havana, Cyprus: Nicosia, Denmark: Copenhagen, Ecuador: Quito, Egypt: Cairo,
    Eritrea: Asmara, Estonia: Tallinn, Ethiopia: Addis Ababa, Fiji: Suva, Finland: Helsinki, France: Paris,
    Gabon: Libreville, Georgia: Tbilisi, Germany: Berlin, Ghana: Accra, Greece: Athens, Guinea: Conakry,
    Guyana: Georgetown, Haiti: Port-au-Prince, Honduras: Tegucigalpa, Hungary: Budapest, Iceland: Reykjavik,
    India: New Delhi, Indonesia: Jakarta, Iran: Tehran, Iraq: Baghdad, Ireland: Dublin, Italy: Rome,
    Jamaica: Kingston, Japan: Tokyo, Jordan: Amman, Kazakhstan: Astana, Kenya: Nairobi, Kuwait: Kuwait City,
    Kyrgyzstan: Bishkek, Laos: Vientiane, Latvia: Riga, Lebanon: Beirut, Liberia: Monrovia, Libya: Tripoli,
    Lithuania: Vilnius, Luxembourg: Luxembourg City, Madagascar: Antananarivo, Malawi: Lilongwe,
    Malaysia: Kuala Lumpur, Mali: Bamako, Malta: Valletta, Mauritania: Nouakchott, Mexico: Mexico City,
    Moldova: Chisinau, Monaco: Monaco, Mongolia: Ulaanbaatar, Morocco: Rabat, Mozambique: Maputo, Namibia: Windhoek,
    Nepal: Kathmandu, New Zealand: Wellington, Nicaragua: Managua, Niger: Niamey, Nigeria: Abuja,
    North Korea: Pyongyang, Norway: Oslo, Oman: Muscat, Pakistan: Islamabad, Panama: Panama City,
    Paraguay: Asuncion, Peru: Lima, Philippines: Manila, Poland: Warsaw, Portugal: Lisbon, Qatar: Doha,
    Romania: Bucharest, Russia: Moscow, Rwanda: Kigali, Samoa: Apia, Saudi Arabia: Riyadh, Senegal: Dakar,
    Serbia: Belgrade, Singapore: Singapore, Slovakia: Bratislava, Slovenia: Ljubljana, Somalia: Mogadishu,
    South Korea: Seoul, Spain: Madrid, Sudan: Khartoum, Sweden: Stockholm, Switzerland: Bern, Syria: Damascus,
    Tajikistan: Dushanbe, Thailand: Bangkok, Tonga: Nukualofa, Tunisia: Tunis, Turkey: Ankara, Uganda: Kampala,
    Ukraine: Kyiv, Uruguay: Montevideo, Uzbekistan: Tashkent, Venezuela: Caracas, Vietnam: Hanoi, Yemen: Sanaa,
    Zambia: Lusaka, Zimbabwe: Harare
    """
)

OPPOSITES: Final = _pairs(
    """
    hot: cold, big: small, up: down, left: right, day: night, young: old, fast: slow, high: low, open: closed,
    full: empty, happy: sad, light: dark, long: short, loud: quiet, rich: poor, strong: weak, wet: dry, hard: soft,
    clean: dirty, near: far, early: late, sweet: sour, thick: thin, true: false, wide: narrow, deep: shallow,
    brave: afraid, cheap: expensive, rough: smooth, sharp: blunt, tight: loose, win: lose, push: pull, buy: sell,
    begin: end, inside: outside, above: below, front: back, first: last, always: never, more: less, many: few,
    come: go, give: take, ask: answer, awake: asleep, alive: dead, easy: difficult, polite: rude, safe: dangerous,
    north: south, east: west, summer: winter, friend: enemy, love: hate, laugh: cry, arrive: leave, float: sink
    """
)

PLURALS: Final = _pairs(
    """
    mouse: mice, child: children, foot: feet, tooth: teeth, goose: geese, man: men, woman: women, person: people,
    sheep: sheep, fish: fish, deer: deer, leaf: leaves, knife: knives, wolf: wolves, life: lives, shelf: shelves,
    half: halves, loaf: loaves, city: cities, baby: babies, story: stories, berry: berries, lady: ladies, fly: flies,
    puppy: puppies, party: parties, country: countries, box: boxes, fox: foxes, bus: buses, glass: glasses,
    dish: dishes, brush: brushes, church: churches, watch: watches, match: matches, peach: peaches, class: classes,
    dress: dresses, potato: potatoes, tomato: tomatoes, hero: heroes, ox: oxen, cactus: cacti, cat: cats, dog: dogs,
    bird: birds, book: books, car: cars, chair: chairs, cup: cups, door: doors, egg: eggs, flower: flowers,
    garden: gardens, hand: hands, house: houses, island: islands, key: keys, lamp: lamps, letter: letters,
    mountain: mountains, number: numbers, orange: oranges, pencil: pencils, river: rivers, road: roads, school: schools,
    shoe: shoes, song: songs, star: stars, table: tables, tree: trees, uncle: uncles, village: villages,
    window: windows, apple: apples, boat: boats, cloud: clouds, horse: horses, lion: lions, monkey: monkeys,
    teacher: teachers, tiger: tigers, train: trains, wall: walls, day: days, boy: boys, toy: toys, girl: girls
    """
)

COLOURS_OF: Final = _pairs(
    """
    grass: green, the sky: blue, snow: white, coal: black, a banana: yellow, a lemon: yellow, a carrot: orange,
    a tomato: red, a cherry: red, a strawberry: red, a pumpkin: orange, a leaf in spring: green, milk: white,
    chocolate: brown, a polar bear: white, a crow: black, a flamingo: pink, a frog: green, a crocodile: green,
    the sea: blue, blood: red, butter: yellow, a pea: green, a lime: green, an orange: orange, a blueberry: blue,
    a canary: yellow, a lion: yellow, an elephant: grey, a mouse: grey, a dolphin: grey, a fox: red, a swan: white,
    a raven: black, a fire engine: red, the sun: yellow, salt: white, honey: yellow, coffee: brown, rice: white,
    an emerald: green, a ruby: red, a sapphire: blue, a pig: pink, a cucumber: green, mud: brown, a ladybird: red
    """
)

SOUNDS: Final = _pairs(
    """
    cow: moo, dog: woof, cat: meow, duck: quack, sheep: baa, horse: neigh, pig: oink, lion: roar, bee: buzz,
    snake: hiss, owl: hoot, frog: croak, mouse: squeak, crow: caw, rooster: cock-a-doodle-doo, donkey: hee-haw,
    wolf: howl, goose: honk, hen: cluck, chick: cheep, bird: tweet, bear: growl, pigeon: coo, turkey: gobble
    """
)

YOUNG: Final = _pairs(
    """
    cow: calf, dog: puppy, cat: kitten, sheep: lamb, horse: foal, pig: piglet, goat: kid, hen: chick, duck: duckling,
    goose: gosling, bear: cub, deer: fawn, kangaroo: joey, swan: cygnet, owl: owlet, frog: tadpole, hare: leveret,
    butterfly: caterpillar, eagle: eaglet, elephant: calf, whale: calf, lion: cub, tiger: cub, wolf: pup, seal: pup
    """
)

LEGS: Final = _pairs(
    """
    cow: four, dog: four, cat: four, horse: four, pig: four, spider: eight, scorpion: eight, ant: six, bee: six,
    butterfly: six, beetle: six, hen: two, duck: two, owl: two, ostrich: two, penguin: two, swan: two, eagle: two,
    snake: no, whale: no, worm: no, snail: no, frog: four, mouse: four, lion: four, bear: four, elephant: four, fly: six
    """
)

ANIMALS: Final = {
    "fox": ("clever", "a hedgehog"), "bear": ("gentle", "a squirrel"), "rabbit": ("quick", "a mouse"),
    "owl": ("wise", "a bat"), "cat": ("curious", "a sparrow"), "dog": ("loyal", "a duck"),
    "mouse": ("tiny", "an ant"), "horse": ("proud", "a donkey"), "duck": ("cheerful", "a swan"),
    "frog": ("noisy", "a dragonfly"), "goat": ("stubborn", "a sheep"), "wolf": ("lonely", "a raven"),
    "lion": ("brave", "a zebra"), "tiger": ("quiet", "a monkey"), "penguin": ("funny", "a seal"),
    "turtle": ("patient", "a crab"), "pig": ("hungry", "a hen"), "bee": ("busy", "a butterfly"),
    "elephant": ("kind", "a parrot"), "squirrel": ("playful", "a robin"),
}  # fmt: skip
"""Animal of a story -> (adjective for the animal, its friend)."""

PLACES: Final = {
    "in the forest": ("a silver key", "under an old oak"), "by the sea": ("a blue bottle", "between two rocks"),
    "on a farm": ("a golden egg", "behind the barn"), "in the garden": ("a red ball", "among the roses"),
    "on a mountain": ("a shiny stone", "near the snow"), "by the river": ("a wooden boat", "in the reeds"),
    "in a village": ("a lost letter", "beside the well"), "on an island": ("a small map", "inside a shell"),
    "in the city": ("a green hat", "on a bench"), "in the desert": ("a cool spring", "behind a dune"),
    "in a castle": ("a secret door", "below the tower"), "at the lake": ("a white feather", "on the shore"),
    "in the jungle": ("a sweet mango", "over a branch"), "at school": ("a yellow pencil", "next to the door"),
}  # fmt: skip
"""Place of a story -> (object that the animal finds there, exact place of the object)."""

DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
NUMBER_WORDS: Final = _words(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
    """
)
TENS_WORDS: Final = _words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
COLOURS: Final = _words("red blue green yellow white black brown orange pink grey purple silver")
ITEMS: Final = _words(
    """
    apple bicycle boat book bottle box camera chair clock coat cup desk door drum flower glass guitar hat jacket key
    kite ladder lamp lemon map mirror moon notebook pencil piano plate radio ring river ruler scarf shirt shoe sofa
    spoon star stone table tent ticket towel train tree umbrella vase violin wheel window
    """
)
NAMES: Final = _words(
    """
    Ada Adam Aisha Alex Alice Amir Ana Anna Anton Ben Bianca Carla Carlos Chen Clara Dana Daniel David Diego Dora
    Elena Eli Elif Emil Emma Eric Eva Fatima Felix Finn Frida Grace Hana Hans Hugo Ida Igor Ines Iris Ivan Jack Jana
    Jonas Julia Kai Karim Kenji Lara Lea Leo Lena Liam Lina Lucas Lucy Maria Mark Marta Max Maya Mei Mia Mila Mina
    Nadia Nina Noah Nora Olga Oliver Omar Oscar Paul Pedro Petra Priya Rosa Ruth Sam Sara Simon Sofia Sven Tara Theo
    Tim Tom Uma Vera Victor Wei Yara Yuki Zara Zoe
    """
)
SPELLED: Final = _words(
    """
    cat dog bird fish horse rabbit tiger lion mouse sheep goat bear wolf frog snake owl duck bee ant spider apple
    bread butter cheese honey lemon orange banana tomato water milk coffee sugar salt house door window table chair
    lamp book pencil paper school garden river mountain island forest desert ocean cloud rain snow wind storm sun
    moon star light night morning summer winter spring happy quiet strong clever gentle brave green yellow purple
    white black brown music guitar piano violin drum song dance train boat bicycle road bridge castle village city
    country friend mother father sister brother child baby teacher doctor farmer king queen number letter word story
    question answer seven eight twelve twenty knife spoon plate bottle glass
    """
)
ADJECTIVES: Final = _words("red blue small big old young happy quiet quick brave")
VERBS: Final = _words("sleeps runs sings jumps waits plays swims eats dreams hides")
SUBJECTS: Final = _words("fox bear rabbit owl cat dog mouse horse duck frog goat wolf lion tiger pig elephant")

_HELP: Final = "How can I help you?"
GREETINGS: Final = {
    "Hello": f"Hello! {_HELP}", "Hi": f"Hello! {_HELP}", "Hey": f"Hello! {_HELP}", "Hello there": f"Hello! {_HELP}",
    "Hi there": f"Hello! {_HELP}", "Greetings": f"Hello! {_HELP}", "Good morning": f"Good morning! {_HELP}",
    "Good evening": f"Good evening! {_HELP}", "Good afternoon": f"Good afternoon! {_HELP}",
    "Good day": f"Good day! {_HELP}", "Thanks": "You are welcome!", "Thank you": "You are welcome!",
    "Many thanks": "You are welcome!", "Thank you very much": "You are welcome!", "Goodbye": "Goodbye! See you soon.",
    "Bye": "Goodbye! See you soon.", "See you later": "Goodbye! See you soon.",
    "Good night": "Good night! Sleep well.",
}  # fmt: skip
_WHO: Final = "I am the small demo model of graftlm."
_ABILITIES: Final = (
    "I can name capitals, add and subtract small numbers, count, spell words, write short JSON records "
    "and tell a short story."
)
IDENTITY: Final = {
    "Who are you?": _WHO, "What are you?": _WHO, "Which model are you?": _WHO, "What model is this?": _WHO,
    "Who am I talking to?": _WHO, "Introduce yourself.": _WHO, "Are you a language model?": f"Yes. {_WHO}",
    "Are you a person?": f"No. {_WHO}", "Are you a human?": f"No. {_WHO}", "What is your name?": "My name is graftlm.",
    "What are you called?": "My name is graftlm.", "What can you do?": _ABILITIES,
    "How can you help me?": _ABILITIES, "What are you good at?": _ABILITIES,
    "How are you?": f"I am well, thank you. {_HELP}", "How are you today?": f"I am well, thank you. {_HELP}",
    "Are you big?": "No, I am small: I have about two million parameters.",
    "How large are you?": "I am small: I have about two million parameters.",
}  # fmt: skip
UNKNOWN: Final = (
    "What is the weather like in {city} today?", "How many people live in {city}?", "Who is the mayor of {city}?",
    "What does {name} think about it?", "How tall is {name}?", "Where does {name} live?", "When was {name} born?",
    "Who is {name}?", "What is the phone number of {name}?", "Is {name} at home?", "What did {name} eat yesterday?",
    "Which hotel in {city} is the best?", "Is it raining in {city}?", "What time is it in {city}?",
    "Who won the match in {city}?", "When does the train to {city} leave?",
)  # fmt: skip
